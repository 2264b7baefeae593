"""Hand-over of open assignments from a buffered round to the next one, in the transaction that commits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.driver.memory.open_rounds import OpenRound
from coordinator.rules.buffers import drawn_in, open_buffer
from coordinator.rules.entities import AssignedDevice, Snapshot
from coordinator.rules.rounds import Aggregated
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


def open_next(records: Records, committed: OpenRound, base: Snapshot, now: float) -> OpenRound:
    """The round that takes over what a committed one handed on, as its value says; it starts from `base`."""
    task, number = committed.task, base.number + 1
    value = open_buffer(task.settings.in_round(number).policy, committed.value.handed_on)
    row_id, attempt = records.add_round(task.id, number, value)
    return OpenRound(row_id, attempt, now, base, task, value, now, predecessor=committed.id)
