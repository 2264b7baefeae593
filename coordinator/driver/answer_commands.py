"""Answers to commands that need no transaction, only memory."""

from __future__ import annotations

from coordinator.commands import (
    AbortAssignment,
    AwaitAssignment,
    AwaitMessage,
    CancelWait,
    CheckInDevice,
    ExchangeMasked,
    PutMessage,
    QueuedCommand,
    settle,
)
from coordinator.driver.memory.in_memory_state import Memory
from coordinator.errors import Refusal


def answer_from_memory(memory: Memory, queued: QueuedCommand, now: float) -> None:
    """Answer a command, or park its future until there is an answer; leave those that need a transaction."""
    future = queued.future
    try:
        match queued.command:
            case CheckInDevice() as command:
                settle(future, memory.check_ins.check_in(command, now))
            case AwaitAssignment() as command:
                memory.check_ins.wait(command, future, now)
            case CancelWait() as command:
                memory.check_ins.cancel_wait(command, now)
                settle(future, None)
            case PutMessage(assignment) as command:
                round_ = memory.secure.of(assignment)
                round_.receive(command, now)
                if command.then is not None:
                    round_.wait(AwaitMessage(assignment, command.number + 1, command.wait_s), command.then, now)
                settle(future, None)
            case AwaitMessage(assignment) as command:
                memory.secure.of(assignment).wait(command, future, now)
            case ExchangeMasked() as command:
                settle(future, memory.secure.exchange(command, now))
            case AbortAssignment(assignment):
                # To stop waiting for it is right whether or not the row can be written.
                memory.secure.leave(assignment)
    except Refusal as refusal:
        settle(future, refusal)
