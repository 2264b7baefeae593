"""One transaction's worth of change to the rounds.

A `Transaction` writes rows as it goes and remembers what memory must become. Nothing outside it changes until the
driver has committed and adopts it; when the commit fails it is dropped, and nothing happened.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.commands import GiveUp, Report
from coordinator.driver.participation import ParticipationLimit
from coordinator.driver.presence import lost_after_s
from coordinator.driver.running import Job, RunningRound, Underway
from coordinator.driver.sessions import Session, Sessions
from coordinator.errors import ConflictingReport, InvalidReport, NoLongerNeeded, Refusal, UnknownAssignment
from coordinator.rules.leases import new_id
from coordinator.rules.rounds import (
    FAILURES,
    Aborted,
    AssignmentState,
    Configured,
    EndAssignments,
    Event,
    Lost,
    Release,
    Reported,
    Round,
    RoundState,
    Select,
    Summed,
    TaskState,
    TurnAway,
    back_off_s,
    open_round,
    step,
)
from coordinator.rules.selection import draw
from coordinator.rules.state import AssignmentRecord, Seat
from coordinator.secure.round import SecureRound, SecureRoundFactory, Terms, invitation
from coordinator.store.records import Records
from fedcore.wire.messages import Assignment, Receipt

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Selector:
    """What cohorts are made with: the waiting devices, who took part lately, chance, what secure rounds need."""

    sessions: Sessions
    source: random.Random
    secure: SecureRoundFactory
    participation: ParticipationLimit = field(default_factory=ParticipationLimit)

    def eligible(self, job: Job, underway: Underway, now: float) -> list[Session]:
        """The waiting devices that could be drawn for a task's next round, as its rounds stand."""
        return self._rested(job, underway.ahead(job.task.id), now)

    def candidates(self, round_: RunningRound, underway: Underway, now: float) -> list[Session]:
        """The waiting devices that a round could draw. None is in a round twice, whatever became of it there."""
        if not round_.reporting:
            return self.eligible(round_.job, underway, now)
        return [one for one in self._rested(round_.job, 0, now) if one.device not in round_.devices]

    def _rested(self, job: Job, ahead: int, now: float) -> list[Session]:
        fitting = self.sessions.eligible(job.population, job.task.id, job.needs)
        return [session for session in fitting if not self.participation.rests(job.task.id, session.device, now, ahead)]

    def due(self, task: str, job: Job | None, underway: Underway, now: float) -> bool:
        """Whether `Transaction.advance` would do anything; out of memory alone."""

        def eligible(round_: RunningRound) -> list[Session]:
            return self.candidates(round_, underway, now)

        for rounds in (underway.running, underway.held):
            if task in rounds:
                if job is not None and self._too_few(rounds[task], now):
                    continue
                event = underway.next_event(rounds[task], job, eligible, now)
                if step(rounds[task].value, event, now) != (rounds[task].value, ()):
                    return True
        return job is not None and underway.may_open(job) and bool(self.eligible(job, underway, now))

    def _too_few(self, round_: RunningRound, now: float) -> bool:
        """Whether a round draws nobody yet, whoever of those that wait is eligible."""
        value = round_.value
        selecting = value.state is RoundState.SELECTING and not value.held and now < value.deadline
        return selecting and self.sessions.count(round_.job.population) < value.policy.cohort


@dataclass(frozen=True, slots=True)
class Ended:
    """An assignment that ended before its round did, and how."""

    assignment: str
    population: str
    device: str
    how: str


class Transaction:
    """One transaction in the making.

    What memory must become: `underway`, `folds` (reports to add, by round), `seated` (sessions that got an assignment,
    and until when), `turned_away` (sessions for which there is none), `ended` (assignments), `left` (task and device of
    those that gave up or vanished), `cohorts` (those drawn), `joined` (slots by assignment, of devices drawn late).
    For whoever counts: `moved` (every step of a round; reports of a turn may be one), `aborts` (their reasons).
    """

    def __init__(self, records: Records, selector: Selector, underway: Underway, now: float) -> None:
        self._records = records
        self._selector = selector
        self._now = now
        self.underway = underway.copy()
        self.folds: defaultdict[int, list[NDArray[np.floating[Any]]]] = defaultdict(list)
        self.seated: dict[str, tuple[Session, Assignment, float]] = {}
        self.turned_away: list[Session] = []
        self.ended: list[Ended] = []
        self.left: list[tuple[str, str]] = []
        self.cohorts: dict[str, list[str]] = {}
        self.joined: list[tuple[SecureRound, dict[str, int]]] = []
        self.moved: list[tuple[RunningRound, Round]] = []
        self.aborts: list[str] = []
        self._given: dict[str, AssignmentRecord] = {}
        self._digests: dict[str, str] = {}
        self._behind: dict[int, RunningRound] = {}

    @property
    def steps(self) -> list[str]:
        """The durable steps in this transaction, as failpoints call them."""
        return ["assignment"] * bool(self.seated) + ["report"] * bool(self.folds)

    def take(self, requests: Sequence[Report | GiveUp]) -> list[Receipt | Refusal | None]:
        """What to answer devices that report or give up, one after the other; rows are read and written together."""
        self._given = self._records.assignments({request.assignment for request in requests})
        answers = [self._answer(request) for request in requests]
        self._write_reports()
        return answers

    def _answer(self, request: Report | GiveUp) -> Receipt | Refusal | None:
        try:
            if isinstance(request, Report):
                return self._report(request)
            self._give_up(request)
        except Refusal as refusal:
            return refusal
        return None

    def _assignment(self, id_: str) -> AssignmentRecord:
        found = self._given.get(id_)
        if found is None:
            raise UnknownAssignment("there is no such assignment; check in again")
        return found

    def _report(self, request: Report) -> Receipt:
        """Count a report, once. Raises UnknownAssignment, ConflictingReport, NoLongerNeeded or InvalidReport."""
        found = self._assignment(request.assignment)
        receipt = Receipt(assignment=found.id, task=found.task, round=found.number, sha256=request.sha256)
        if found.report_sha256 == request.sha256:
            return receipt
        if found.report_sha256 is not None:
            raise ConflictingReport(
                f"a report with digest {found.report_sha256[:12]}… was accepted; this one is another"
            )
        running = self._open_to(found)
        if running.secure is not None:
            raise InvalidReport("this round takes masked reports alone, as messages of its secure aggregation")
        self._count(found, request.sha256)
        self.folds[running.id].append(request.vector)
        self._end(running, found, "reported")
        self._step(running, Reported())
        return receipt

    def _count(self, found: AssignmentRecord, sha256: str) -> None:
        self._digests[found.id] = sha256
        self._given[found.id] = replace(found, state=AssignmentState.REPORTED, report_sha256=sha256)

    def _write_reports(self) -> None:
        """Write the reports that were counted, and how many their rounds have."""
        self._records.add_reports(self._digests)
        for after in self.underway:
            if (before := self._behind.get(after.id)) is not None:
                self._records.move_round(after.id, before.value, after.value, "reported")
                self.moved.append((before, after.value))
        self._digests, self._behind = {}, {}

    def _give_up(self, request: GiveUp) -> None:
        """End an assignment; one that ended without a report stays as it is.

        Raises UnknownAssignment, or ConflictingReport when the report was counted already.
        """
        found = self._assignment(request.assignment)
        if found.state is AssignmentState.REPORTED:
            raise ConflictingReport("this assignment's report was accepted; it cannot be given up any more")
        with suppress(NoLongerNeeded):
            running = self._open_to(found)
            if running.secure is not None and found.id in running.secure.uploads:
                raise ConflictingReport("this assignment's masked report was added; it cannot be given up any more")
            self._records.move_assignment(found, AssignmentState.ABORTED, "device", request.message.reason)
            self._given[found.id] = replace(found, state=AssignmentState.ABORTED)
            self._end(running, found, f"aborted: {request.message.reason}")
            self.left.append((found.task, found.device))
            self.aborts.append(request.message.reason)
            self._step(running, Aborted())

    def lose(self, lost: Mapping[int, Collection[str]]) -> None:
        """Go on without devices that are not heard of, as far as their assignments are still open; by round.

        One whose masked report is in the sum of its round stays: it is not needed for that any more.
        """
        for running in [one for one in self.underway.running.values() if one.reporting and one.id in lost]:
            names = set(lost[running.id]) - (running.secure.uploads.keys() if running.secure else set())
            gone = self._records.end_assignments(running.id, AssignmentState.LOST, "not heard of", names)
            for found in gone:
                self._end(running, found, "lost")
                self.left.append((running.job.task.id, found.device))
            if gone:
                self._step(running, Lost(len(gone), running.secure is not None and running.secure.proven))

    def _end(self, running: RunningRound, seat: AssignmentRecord | Seat, how: str) -> None:
        self.ended.append(Ended(seat.id, running.job.population, seat.device, how))

    def advance(self, task: str, job: Job | None) -> None:
        """Open, move or end a task's rounds, as time and the waiting devices ask; without a job, the task is over."""
        for rounds in (self.underway.running, self.underway.held):
            if task in rounds:
                self._advance(rounds[task], job)
        if job is not None and self._may_open(job):
            self._advance(self._open(job), job)

    def _advance(self, round_: RunningRound, job: Job | None) -> None:
        if job is not None and (round_.value.state is RoundState.SELECTING or round_.draws(self._now)):
            job = self._as_it_stands(job)
        event = self.underway.next_event(round_, job, self._candidates, self._now)
        if isinstance(event, Summed):
            self._add_sum(round_)
        self._step(round_, event)

    def _as_it_stands(self, job: Job) -> Job | None:
        """A job as its task is by now, if an operator or this very transaction moved it; None when it is over."""
        match self._records.task(job.task.id).state:
            case TaskState.ACTIVE:
                return job
            case TaskState.PAUSED:
                return job.paused()
        return None

    def _add_sum(self, running: RunningRound) -> None:
        """Count every masked report that is in the sum which came out."""
        if running.secure is not None:
            digests = running.secure.uploads
            self._records.add_reports(digests)
            for one in self._records.assignments(digests).values():
                self._end(running, one, "reported")
            self.folds[running.id].append(running.secure.total(running.job.plan.report))

    def _may_open(self, job: Job) -> bool:
        wanted = self.underway.may_open(job) and bool(
            self._unseated(self._selector.eligible(job, self.underway, self._now))
        )
        return wanted and self._records.task(job.task.id).state is TaskState.ACTIVE

    def _open(self, job: Job) -> RunningRound:
        ahead = self.underway.running.get(job.task.id)
        base = ahead.base if ahead else self._records.snapshot(job.task)
        number = base.number + (2 if ahead else 1)
        row_id, attempt = self._records.add_round(job.task.id, number)
        held = self.underway.holds(job.task.id, self._now)
        value = open_round(job.task.settings.policy, self._now, held=held)
        round_ = RunningRound(row_id, attempt, self._now, base, job, value, self._now)
        self.underway.put(round_)
        return round_

    def _open_to(self, found: AssignmentRecord) -> RunningRound:
        running = self.underway.running.get(found.task)
        if running is None or running.id != found.round or found.state is not AssignmentState.ASSIGNED:
            raise NoLongerNeeded(f"the assignment is {found.state} and its round needs no report of it")
        if running.value.state is not RoundState.REPORTING or self._now >= running.value.deadline:
            raise NoLongerNeeded(f"round {found.number} has what it needs, or its deadline has passed")
        return running

    def _step(self, running: RunningRound, event: Event) -> None:
        value, effects = step(running.value, event, self._now)
        if (value, effects) == (running.value, ()):
            return
        if isinstance(event, Reported) and value.state is running.value.state and not effects:
            # Many in a turn: their rows are written together, before anything else of the round is.
            self._behind.setdefault(running.id, running)
            self.underway.put(replace(running, value=value))
            return
        self._write_reports()
        if Release() in effects:
            running = self._release(running)
        cause = value.reason or type(event).__name__.lower()
        self._records.move_round(running.id, running.value, value, cause)
        self.moved.append((running, value))
        goes_on = value.state is running.value.state and value.revealed is running.value.revealed
        after = replace(running, value=value, entered_at=running.entered_at if goes_on else self._now)
        self.underway.put(after)
        if value.reason in FAILURES:
            self.underway.not_before[after.job.task.id] = self._now + set_back(self._records, after, value.reason)
        for effect in effects:
            match effect:
                case Select(count):
                    self._select(after, count)
                case TurnAway():
                    self.turned_away += self._candidates(after)
                case EndAssignments(state):
                    self._records.end_assignments(running.id, state, cause)

    def _release(self, round_: RunningRound) -> RunningRound:
        base = self._records.snapshot(round_.job.task)
        attempt = self._records.release_round(round_.id, round_.job.task.id, base.number + 1)
        return replace(round_, base=base, attempt=attempt, entered_at=self._now)

    def _select(self, running: RunningRound, count: int) -> None:
        """Draw devices, a cohort or some that are missing of it, and give them their assignments."""
        chosen, first = draw(self._candidates(running), count, self._selector.source), running.value.assigned
        replica, task = self._selector.sessions.replica, running.job.task
        seats = [Seat(new_id(replica), slot, session.device) for slot, session in enumerate(chosen, first)]
        self._records.add_assignments(running.id, seats)
        devices = [seat.device for seat in seats]
        self.cohorts.setdefault(task.id, []).extend(devices)
        self._step(replace(running, devices=running.devices.union(devices)), Configured(len(seats)))
        for_all = self._for_all(self.underway.running[task.id], seats)
        for session, seat in zip(chosen, seats, strict=True):
            given = msgspec.structs.replace(for_all, assignment=seat.id, slot=seat.slot)
            self.seated[session.id] = (session, given, self._now + given.report_within_s)

    def _for_all(self, running: RunningRound, seats: Sequence[Seat]) -> Assignment:
        """What every assignment says that is given now."""
        task = running.job.task
        policy = task.settings.policy
        for_all = Assignment(
            assignment="",
            task=task.id,
            round=running.number,
            attempt=running.attempt,
            slot=0,
            seed=task.settings.seed,
            plan=self._records.blob(task.plan_sha256, public=True),
            checkpoint=self._records.blob(running.base.checkpoint_sha256, public=True),
            report_within_s=running.value.deadline - self._now,
            plan_signature=task.plan_signature,
            minimum=policy.minimum,
            over_selected=running.value.attainable > policy.goal,
            lost_after_s=lost_after_s(policy.cohort),
        )
        if task.settings.secagg is None:
            return for_all
        slots = {seat.id: seat.slot for seat in seats}
        if running.secure is None:
            return self._invite(running, for_all, slots)
        self.joined.append((running.secure, slots))
        return msgspec.structs.replace(for_all, secagg=running.secure.invitation)

    def _invite(self, running: RunningRound, given: Assignment, slots: Mapping[str, int]) -> Assignment:
        """Start the secure aggregation of a round: what every assignment of it says."""
        settings = running.job.task.settings
        deadline = int(self._records.at + given.report_within_s)
        invite = invitation(settings, running.job.plan, given, deadline)
        secure = self._selector.secure.open(invite, slots, Terms.of(settings, self._now))
        self.underway.put(replace(running, secure=secure))
        return msgspec.structs.replace(given, secagg=secure.invitation)

    def _candidates(self, round_: RunningRound) -> list[Session]:
        return self._unseated(self._selector.candidates(round_, self.underway, self._now))

    def _unseated(self, waiting: Iterable[Session]) -> list[Session]:
        return [session for session in waiting if session.id not in self.seated]


def set_back(records: Records, round_: RunningRound, reason: str) -> float:
    """Note that an attempt at a round failed; answers for how many seconds the task must open no other.

    A task whose attempts fail too often in a row is paused: its plan, or what devices hold, needs an operator.
    """
    task = records.task(round_.job.task.id)
    failures, most = records.failures(task.id, round_.number), task.settings.max_attempts
    if failures >= most and task.state is TaskState.ACTIVE:
        words = f"round {round_.number} failed {failures} times in a row, at last with {reason}"
        _LOG.error("task %s is paused: %s", task.id, words)
        records.move_task(task, TaskState.PAUSED, reason, f"{words}; find out why, then resume it")
    return back_off_s(failures)
