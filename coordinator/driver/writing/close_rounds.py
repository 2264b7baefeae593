"""Closing of rounds that have their reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.driver.memory.in_memory_state import Memory
from coordinator.driver.memory.open_rounds import OpenRound
from coordinator.driver.replica_membership import Membership
from coordinator.driver.writing.commit_round import commit_round
from coordinator.driver.writing.write_transactions import Writer
from coordinator.metrics import Metrics
from coordinator.rules.buffers import refusal
from coordinator.rules.entities import AssignedDevice
from coordinator.rules.states import AssignmentState, RoundState
from fedcore.signing import SigningKey


@dataclass(frozen=True, slots=True)
class RoundCloser:
    """Commits rounds in AGGREGATING, each in a transaction of its own. Only the driver's thread uses it."""

    membership: Membership
    memory: Memory
    writer: Writer
    metrics: Metrics
    lineage: SigningKey

    def close_rounds(self, now: float) -> bool:
        """Close every round that has its reports. Whether any was closed, so that its task must be read again."""
        closed = False
        for task_id, opened in list(self.memory.rounds.running.items()):
            if opened.value.state is not RoundState.AGGREGATING or task_id not in self.memory.rounds.running:
                continue
            # As it stands now: no round follows when it was paused, or its population is about to be given back.
            running = replace(opened, task=self.memory.tasks.get(task_id, opened.task.paused()))
            try:
                collected = self.memory.sums[running.id]
                outcome = commit_round(self.membership, self.lineage, running, collected, now, self.metrics.round_steps)
            except Exception as error:
                # The sum is still here: the round stays in AGGREGATING and is closed when the disk allows it.
                self.writer.fail(error, now)
                continue
            value = outcome.value
            self.metrics.round_moved(running.value, value, now - running.entered_at, now - running.opened_at)
            after = self.memory.rounds.copy()
            del after.running[task_id]
            if outcome.successor is not None:
                after.running[task_id] = outcome.successor
            after.not_before[task_id] = now + outcome.pause_s
            if value.state is RoundState.COMMITTED:
                after.commit(task_id)
            else:
                after.leave_out(task_id, outcome.left_out)
            self._end_stale(running, outcome.too_stale)
            going_on = self.memory.sessions.at_work(task_id) if outcome.successor is not None else frozenset()
            committed = value.state is RoundState.COMMITTED
            self.memory.participation.end(task_id, now, committed=committed, going_on=going_on)
            self.memory.replace_rounds(after, now)
            closed = True
        return closed

    def _end_stale(self, round_: OpenRound, too_stale: Sequence[AssignedDevice]) -> None:
        """Tell the devices whose reports are refused from now on."""
        for assigned in too_stale:
            self.memory.sessions.end_assignment(round_.task.population, assigned.device, "too stale")
        self.memory.presence.forget([assigned.id for assigned in too_stale], refusal(AssignmentState.TOO_STALE))
