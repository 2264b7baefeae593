"""Hand-over of open assignments from a buffered round to the next one, in the transaction that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.driver.memory.open_rounds import OpenRound
from coordinator.rules.buffers import drawn_in, open_buffer
from coordinator.rules.entities import AssignedDevice, Snapshot
from coordinator.rules.rounds import Abandon, Aggregated, Round
from coordinator.rules.states import AssignmentState
from coordinator.store.records.records import Records


@dataclass(frozen=True, slots=True)
class HandOver:
    """The open assignments at the end of a buffered round: those that are too stale now, and how many go on."""

    too_stale: Sequence[AssignedDevice] = ()
    going_on: int = 0

    @property
    def event(self) -> Aggregated:
        """The end of the round."""
        return Aggregated(stale=len(self.too_stale), handed_on=self.going_on)


def end_or_keep(records: Records, running: OpenRound, *, goes_on: bool) -> HandOver:
    """End the assignments that are too stale for the next round; all of them unless the task goes on with one."""
    task, number = running.task, running.number
    if not goes_on:
        records.end_assignments(task.id, running.numbers, AssignmentState.NOT_NEEDED, "no round follows")
        return HandOver()
    following = drawn_in(number + 1, task.settings.max_staleness)
    old = range(running.numbers.start, following.start)
    too_stale = records.end_assignments(task.id, old, AssignmentState.TOO_STALE, f"version {number} was committed")
    return HandOver(too_stale, running.value.outstanding - len(too_stale))


def open_next(records: Records, ended: OpenRound, base: Snapshot, now: float) -> OpenRound:
    """The round that takes over what one that ended handed on, as its value says; it starts from `base`."""
    task, number = ended.task, base.number + 1
    value = open_buffer(task.settings.in_round(number).policy, ended.value.handed_on)
    row_id, attempt = records.add_round(task.id, number, value)
    return OpenRound(row_id, attempt, now, base, task, value, now, predecessor=ended.id)


def begin_again(
    records: Records, running: OpenRound, reason: str, now: float
) -> tuple[Round, OpenRound, frozenset[str]]:
    """Abandon a round, and open the next attempt at it, which takes over its open assignments.

    Answers the round as it ended, the attempt, and those assignments.
    """
    at_work = frozenset(assigned.id for assigned in records.cohorts.at_work(running.task.id, running.numbers))
    value, _ = running.after(Abandon(reason, len(at_work)), now)
    records.move_round(running.id, running.value, value, reason)
    return value, open_next(records, replace(running, value=value), running.base, now), at_work
