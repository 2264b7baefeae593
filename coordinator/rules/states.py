"""States of rounds, assignments and tasks, and the moves that assignments and tasks may make between theirs."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from coordinator.errors import UnexpectedEvent


class RoundState(StrEnum):
    """The state of a round. The moves between them: `rules.rounds.step`."""

    SELECTING = "selecting"
    CONFIGURING = "configuring"
    REPORTING = "reporting"
    AGGREGATING = "aggregating"
    COMMITTED = "committed"
    ABANDONED = "abandoned"

    @property
    def ended(self) -> bool:
        """Nothing can follow."""
        return self in (RoundState.COMMITTED, RoundState.ABANDONED)


class AssignmentState(StrEnum):
    """The state of one device's part in a round."""

    ASSIGNED = "assigned"
    REPORTED = "reported"
    ABORTED = "aborted"
    LOST = "lost"
    NOT_NEEDED = "not-needed"
    EXPIRED = "expired"
    TOO_STALE = "too-stale"


class LeftOut(StrEnum):
    """Why a device is left out of further attempts at a secure round."""

    REVEALED = "already-revealed"
    SUSPECTED = "suspected"


class TaskState(StrEnum):
    """The state of a task. A paused task opens no new round; the running one finishes."""

    ACTIVE = "active"
    PAUSED = "paused"
    COMPLETED = "completed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Nothing can follow."""
        return self in (TaskState.COMPLETED, TaskState.CANCELLED)


Stage = TypeVar("Stage", AssignmentState, TaskState)
_OVER = {state for state in TaskState if state.ended}
_MOVES: dict[AssignmentState | TaskState, set[AssignmentState] | set[TaskState]] = {
    AssignmentState.ASSIGNED: set(AssignmentState) - {AssignmentState.ASSIGNED},
    TaskState.ACTIVE: {TaskState.PAUSED} | _OVER,
    TaskState.PAUSED: {TaskState.ACTIVE} | _OVER,
}


def move(current: Stage, to: Stage) -> Stage:
    """`to`, when an assignment or task may go there from `current`. Raises UnexpectedEvent otherwise."""
    if to not in _MOVES.get(current, ()):
        raise UnexpectedEvent(f"{current} cannot become {to}")
    return to
