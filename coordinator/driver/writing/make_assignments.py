"""Openings of rounds, assignments and their hand-over, and the effects of a transaction on memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from coordinator.commands import CountReport
from coordinator.driver.memory.open_rounds import LoadedTask, OpenRound, OpenRounds
from coordinator.driver.memory.selector import Selector
from coordinator.driver.memory.sessions import Session
from coordinator.keys import log_proof
from coordinator.rules.aggregation import bounded_report
from coordinator.rules.buffers import drawn_in, open_buffer, staleness_weight
from coordinator.rules.entities import AssignedDevice, AssignmentRecord, Snapshot
from coordinator.rules.replicas import Counted, SharedRound, assignment_id
from coordinator.rules.rounds import Abandon, Aggregated, Round, open_round
from coordinator.rules.states import AssignmentState, TaskState, lost_after_s
from coordinator.secure.round import SecureRoundFactory, SecureRoundSettings, invitation
from coordinator.store.records.records import Records
from fedcore.plan import is_second
from fedcore.signing import SigningKey
from fedcore.wire.messages import Assignment

# Effects of a transaction on memory, and the reports that it counts.


@dataclass(frozen=True, slots=True)
class RoundMoved:
    """A round went from `before` to `after`. Several reports of one turn may be one such effect."""

    before: OpenRound
    after: Round


@dataclass(frozen=True, slots=True)
class ReportsCounted:
    """Reports (L,), or the sum of many, that belong into the sum of a round."""

    round: OpenRound
    vectors: list[NDArray[np.floating[Any]]]


@dataclass(frozen=True, slots=True)
class SharedReportsCounted:
    """Reports (L,) that belong into the sum of a round of another replica, and which they are."""

    round: SharedRound
    counted: list[Counted]
    vectors: list[NDArray[np.floating[Any]]]


@dataclass(frozen=True, slots=True)
class SumHandedOver:
    """The sum (L,) of all `count` reports of a round that came to another replica."""

    round: OpenRound
    replica: str
    count: int
    total: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AssignmentEnded:
    """An assignment that ended before its round did, or apart from it. reason: of the device, when it gave up."""

    assignment: str
    device: str
    population: str
    task: str
    state: AssignmentState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DevicesDrawn:
    """Sessions that were given an assignment each, until when on the driver's clock. round: as it is after the draw."""

    round: OpenRound
    assignments: Sequence[tuple[Session, Assignment]]
    until: float


@dataclass(frozen=True, slots=True)
class DevicesTurnedAway:
    """Sessions for which a round has no assignment. Another round may have drawn some of them since."""

    sessions: Sequence[Session]


Effect: TypeAlias = (
    RoundMoved
    | ReportsCounted
    | SharedReportsCounted
    | SumHandedOver
    | AssignmentEnded
    | DevicesDrawn
    | DevicesTurnedAway
)


class Deferred(Enum):
    """An answer that is still to come: the next transaction will have it."""

    DEFERRED = "deferred"


DEFERRED = Deferred.DEFERRED


class CountedReports:
    """Reports that are counted and not written yet, and the rounds as they were before."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._digests: dict[str, tuple[int, str]] = {}
        """By assignment: the round's row id, and the digest."""
        self._here: dict[int, ReportsCounted] = {}
        self._shared: dict[int, SharedReportsCounted] = {}
        self._before: dict[int, OpenRound] = {}

    def add(self, round_: OpenRound, record: AssignmentRecord, command: CountReport) -> int:
        """Count a report to a round that this process drives, within its bounds; answers its staleness."""
        self._digests[record.id] = round_.id, command.sha256
        bounded = bounded_report(round_.task.settings.clear, command.vector, round_.plan.report, round_.codec_key)
        staleness = round_.number - record.number
        self._here.setdefault(round_.id, ReportsCounted(round_, [])).vectors.append(_weighed(bounded, staleness))
        return staleness

    def add_shared(
        self, shared: SharedRound, record: AssignmentRecord, command: CountReport, staleness: int = 0
    ) -> None:
        """Count a report to a round that another replica drives."""
        self._digests[record.id] = shared.id, command.sha256
        effect = self._shared.setdefault(shared.id, SharedReportsCounted(shared, [], []))
        bounded = bounded_report(shared.clear, command.vector, shared.layout, shared.codec_key)
        effect.counted.append(Counted(record.id, record.device, staleness))
        effect.vectors.append(_weighed(bounded, staleness))

    def move(self, before: OpenRound) -> None:
        """A report moves a round, which is as it was before its first one in this turn."""
        self._before.setdefault(before.id, before)

    def write(self, rounds: Iterable[OpenRound]) -> list[Effect]:
        """Write them, and how many these rounds have; answers what memory must take over."""
        self._records.add_reports(self._digests)
        effects: list[Effect] = []
        for after in rounds:
            if (before := self._before.get(after.id)) is not None:
                self._records.move_round(after.id, before.value, after.value, "reported")
                effects.append(RoundMoved(before, after.value))
        effects += [*self._here.values(), *self._shared.values()]
        self._digests, self._here, self._shared, self._before = {}, {}, {}, {}
        return effects


def _weighed(report_L: NDArray[np.floating[Any]], staleness: int) -> NDArray[np.floating[Any]]:
    """A report as it counts from a model that is so many versions old."""
    return staleness_weight(staleness) * report_L.astype(np.float64) if staleness else report_L


# Openings: a round's rows, the buffer that a report goes into, assignments for devices, and their hand-over.


def open_round_of(records: Records, rounds: OpenRounds, task: LoadedTask, now: float) -> OpenRound:
    """Open the next round of a task, and put it among `rounds`; held, as long as it must wait for another one."""
    running = rounds.running.get(task.id)
    base = running.base if running else records.snapshot(task.record)
    number = base.number + (2 if running else 1)
    members = None
    if task.settings.same_cohort and is_second(number):
        members = records.cohorts.counted_devices(task.id, records.made_in(task.record, base))
    policy = task.settings.in_round(number).policy.among(None if members is None else len(members))
    held = rounds.must_hold(task.id, now)
    value = open_buffer(policy) if policy.buffered else open_round(policy, now, held=held)
    row_id, attempt = records.add_round(task.id, number, value)
    round_ = OpenRound(row_id, attempt, now, base, task, value, now, members=members)
    rounds.put(round_)
    return round_


def as_it_stands(records: Records, task: LoadedTask) -> LoadedTask | None:
    """A task as it is by now, if an operator or this very transaction moved it; None when it is over."""
    match records.task(task.id).state:
        case TaskState.ACTIVE:
            return task
        case TaskState.PAUSED:
            return task.paused()
    return None


@dataclass(frozen=True, slots=True)
class OpenBuffers:
    """The buffers that are open, as one transaction finds them."""

    records: Records
    _found: dict[str, tuple[int, int] | None] = field(default_factory=dict)

    def of(self, shared: SharedRound, record: AssignmentRecord) -> tuple[SharedRound, int] | None:
        """The round whose buffer takes the report of an assignment, and the report's staleness; None while none does.

        shared: the round that drew the device. The assignment must be held by this transaction: a driver that closes
        its buffer takes hold of all open assignments. So the buffer that is found here takes this report.
        """
        if record.task not in self._found:
            self._found[record.task] = self.records.attempts.reporting(record.task)
        found = self._found[record.task]
        return None if found is None else (dataclasses.replace(shared, id=found[0]), found[1] - record.number)


def assigned_devices(selector: Selector, round_: OpenRound, devices: Sequence[str], first: int) -> list[AssignedDevice]:
    """The assignments of devices that a round drew, from the slot `first` on, under ids that any replica can check."""
    key, replica = selector.secure.keys.of_assignments, selector.sessions.replica
    return [
        AssignedDevice(assignment_id(key, replica, round_.id, slot, device), slot, device)
        for slot, device in enumerate(devices, first)
    ]


def common_part(records: Records, round_: OpenRound, key: SigningKey, now: float) -> Assignment:
    """The part that is the same in all assignments that a round gives now; without the invitation of a secure round.

    key: the lineage key, which signs the head of the log of releases.
    """
    task, policy = round_.task.record, round_.value.policy
    return Assignment(
        assignment="",
        task=task.id,
        round=round_.number,
        attempt=round_.attempt,
        slot=0,
        seed=task.settings.seed,
        plan=records.blob(task.plan_sha256, public=True),
        checkpoint=records.blob(round_.base.checkpoint_sha256, public=True),
        report_within_s=round_.report_within_s(now),
        plan_signature=task.plan_signature,
        release=task.release,
        lineage=round_.base.lineage,
        log=None if task.release is None else log_proof(key, records.releases.log(), task.release),
        minimum=policy.minimum,
        over_selected=round_.value.attainable > policy.goal,
        lost_after_s=lost_after_s(policy.cohort),
        purpose=task.settings.purpose or msgspec.UNSET,
        target=task.settings.where or msgspec.UNSET,
    )


def invite(
    factory: SecureRoundFactory, round_: OpenRound, common: Assignment, assignments: Sequence[AssignedDevice], at: float
) -> OpenRound:
    """The round with the secure aggregation of its first devices. at: now, in seconds since 1970."""
    task, policy, slots = round_.task, round_.value.policy, {device.id: device.slot for device in assignments}
    message = invitation(task.settings, policy, round_.plan, common, deadline=int(at + common.report_within_s))
    settings = SecureRoundSettings.of(task.settings.secagg, policy, round_.value.deadline)
    return replace(round_, secure=factory.open(message, slots, settings))


def for_device(common: Assignment, device: AssignedDevice) -> Assignment:
    """The assignment of one device."""
    return replace(common, assignment=device.id, slot=device.slot)


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
