"""States of rounds, assignments and tasks, the silence of devices, and conditions on them. Pure."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, TypeVar

from coordinator.errors import InvalidTask, UnexpectedEvent, demand
from fedcore.conditions import MEBIBYTE, ConditionRules, StatedConditions
from fedcore.validation import Count, check, checked, setting


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


_BROKEN_S, _BROKEN_SHARE = 2.0, 0.25
_LEAST_SILENCE_S, _CONTACTS_PER_S = 5.0, 100.0


def lost_after_s(devices: int) -> float:
    """The seconds of silence after which a device is lost, in a round of `devices`.

    It grows with the round, so that all of its devices together make no more requests than one process answers.
    """
    return _LEAST_SILENCE_S + devices / _CONTACTS_PER_S


def broken_after_s(lost_after_s: float) -> float:
    """The seconds without a request after which a device is lost whose connection broke, where silence takes so long.

    A process that is killed closes its connections, and so does a proxy that restarts; behind it the device asks again.
    """
    return min(max(_BROKEN_S, _BROKEN_SHARE * lost_after_s), lost_after_s)


# Rules of a task on devices: on what a device states, and on what only the device checks and never tells. Pure.
#
# Spec: docs/spec/rounds.md §6. What conditions are, and whether they hold: fedcore/conditions.py.

_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_LONGEST_RELEASE = 100
_VERSION = rf"^{_RELEASE.pattern}$(?!\n)"
_WORDS = f"numbers with points between, in {_LONGEST_RELEASE} characters at most"


@checked(InvalidTask)
class Requires(ConditionRules, frozen=True, kw_only=True):
    """Rules on what a device states at check-in. Raises InvalidTask naming the rule and what it may be."""

    min_version: (
        Annotated[
            str,
            setting("Oldest version of its runtime.", pattern=_VERSION, max_length=_LONGEST_RELEASE, allowed=_WORDS),
        ]
        | None
    ) = None
    min_memory_bytes: Annotated[Count, setting("Least memory of the device.", unit="bytes")] | None = None

    def __post_init__(self) -> None:
        check(self)

    def unmet_by(self, version: str, memory_mb: int | None, stated: StatedConditions) -> str:
        """The kind of rule that keeps a device of that runtime version and memory out; "" when all hold."""
        if self.min_version is not None and _release(version) < _release(self.min_version):
            return "version"
        least = self.min_memory_bytes
        if least is not None and (memory_mb is None or memory_mb * MEBIBYTE < least):
            return "memory"
        return "conditions" if self.unmet(stated) else ""


@checked(InvalidTask)
class OnDevice(ConditionRules, frozen=True, kw_only=True):
    """Rules that only the device checks, before it waits for a task. By default there are none.

    Raises InvalidTask naming the rule and what it may be.
    """

    min_examples: Annotated[Count, setting("Least examples in the plan's collection.")] = 0
    max_example_age_s: (
        Annotated[float, setting("Greatest age of an example that counts.", unit="seconds", gt=0)] | None
    ) = None

    def __post_init__(self) -> None:
        check(self)
        counted = self.max_example_age_s is None or self.min_examples > 0
        demand(counted, "min_examples", "at least 1 with max_example_age_s", self.min_examples)


@lru_cache(maxsize=256)  # at every check-in the same rule, and of many devices the same few releases
def _release(version: str) -> tuple[int, ...]:
    """The numbers at the start of a version, for comparison; empty without any."""
    match = _RELEASE.match(version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
