"""Rollback of a task to an earlier model: which rounds the next one can go on from. Pure. Spec: docs/spec/rounds.md."""

from __future__ import annotations

from coordinator.errors import TaskEnded, UnknownRound
from coordinator.rules.entities import Task
from coordinator.rules.task_settings import MOST_COUNT


def check_rollback(last: int, to: int, trips: int) -> None:
    """Raise UnknownRound unless a task whose last round is `last` can go on from the model after round `to`.

    The rollback is itself a round, and what was broadcast after `to` is for the trip that came next then. trips: of the
    task's algorithm.
    """
    if (last + 1 - to) % trips:
        # Of two trips the first leaves the model as it is: it is the same after round 2k and after round 2k + 1.
        same = to - 1 if to % 2 else to + 1
        raise UnknownRound(
            f"rounds of this task take {trips} trips in turn, and the next round's does not go on from round {to}; "
            f"round {same} led to the same model: roll back to that one"
        )


def rounds_after(rounds: int, number: int, to: int) -> int:
    """The rounds of a task once round `number` of it is a rollback to the model after `to`: it gets those again."""
    return min(rounds + number - to, MOST_COUNT)


def check_clients(task: Task) -> None:
    """Raise TaskEnded when the server's vectors are the mean of those on devices, which no rollback reaches."""
    if task.settings.clients is not None:
        raise TaskEnded(
            f"devices keep vectors for task {task.id}, of which its server state is the mean, and a rollback does not "
            "reach them: cancel it, and start another task from that model"
        )


def check_participations(task: Task) -> None:
    """Raise TaskEnded when the privacy of a task counts on rounds between participations: a rollback has no devices."""
    settings = task.settings
    if settings.privacy is not None and settings.min_separation_rounds > 1:
        raise TaskEnded(
            f"the privacy of task {task.id} counts on {settings.min_separation_rounds} rounds of devices from one "
            "participation to the next, and a rollback is a round without devices: cancel it, and start another task "
            "from that model, to whose own ε that of the task so far is added"
        )
