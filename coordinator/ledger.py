"""Rounds that run, and one transaction's worth of change to them.

A `Draft` writes rows as it goes and remembers what memory must become. Nothing outside it changes until the driver has
committed the transaction and adopts the draft; when the commit fails the draft is dropped and nothing happened.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.errors import ConflictingReport, InvalidReport, NoLongerNeeded
from coordinator.pool import Pool, Session
from coordinator.rounds import (
    Abandon,
    Aborted,
    AssignmentState,
    Configured,
    Event,
    ExpireAssignments,
    Reported,
    Revealed,
    Round,
    RoundState,
    Select,
    Summed,
    TaskState,
    Tick,
    TurnAway,
    Waiting,
    open_round,
    step,
)
from coordinator.secure import Pace, SecureRound, SecureRounds, invitation
from coordinator.selection import Needs, draw
from coordinator.store.records import Records
from coordinator.store.rows import AssignmentRecord, Seat, Snapshot, Task
from coordinator.submissions import GiveUp, Report
from fedcore.plan import Plan
from fedcore.wire.messages import Assignment, Receipt


@dataclass(frozen=True, slots=True)
class Job:
    """A task with its plan and what it needs of a device."""

    task: Task
    plan: Plan
    needs: Needs

    @classmethod
    def of(cls, task: Task, plan: Plan) -> Job:
        """The job that a task and its plan make."""
        needs = Needs(frozenset(plan.graphs), plan.examples.collection, task.settings.min_examples)
        return cls(task, plan, needs)


@dataclass(frozen=True, slots=True)
class Running:
    """A round that has not ended: its row, where it started from, its value, and its masked sum if it has one."""

    id: int
    attempt: int
    base: Snapshot
    job: Job
    value: Round
    secure: SecureRound | None = None

    @property
    def number(self) -> int:
        """The round's number."""
        return self.base.number + 1


def next_event(running: Running, cancelled: bool, eligible: int) -> Event:
    """What a running round must be told now, apart from reports."""
    if cancelled:
        return Abandon("cancelled")
    if running.value.state is RoundState.SELECTING:
        return Waiting(eligible)
    if running.value.state is RoundState.REPORTING and running.secure is not None:
        return running.secure.event or (Revealed() if running.secure.unmasking else Tick())
    return Tick()


class Draft:
    """One transaction in the making. `running`, `folds`, `seated` and `turned_away` are what memory must become."""

    def __init__(
        self, records: Records, secagg: SecureRounds, running: Mapping[str, Running], pool: Pool, now: float
    ) -> None:
        self._records = records
        self._secagg = secagg
        self._pool = pool
        self._now = now
        self._source = random.SystemRandom()
        self.running = dict(running)
        self.folds: list[tuple[int, NDArray[np.floating[Any]]]] = []
        self.seated: dict[str, tuple[Session, Assignment, float]] = {}
        self.turned_away: list[Session] = []

    def report(self, request: Report) -> Receipt:
        """Count a report, once. Raises UnknownAssignment, ConflictingReport, NoLongerNeeded or InvalidReport."""
        found = self._records.assignment(request.assignment)
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
        self._records.add_report(found, request.sha256)
        self.folds.append((running.id, request.vector))
        self._step(running, Reported())
        return receipt

    def give_up(self, request: GiveUp) -> None:
        """End an assignment; one that ended without a report stays as it is.

        Raises UnknownAssignment, or ConflictingReport when the report was counted already.
        """
        found = self._records.assignment(request.assignment)
        if found.state is AssignmentState.REPORTED:
            raise ConflictingReport("this assignment's report was accepted; it cannot be given up any more")
        with suppress(NoLongerNeeded):
            running = self._open_to(found)
            if running.secure is not None and found.id in running.secure.uploads:
                raise ConflictingReport("this assignment's masked report was added; it cannot be given up any more")
            self._records.move_assignment(found, AssignmentState.ABORTED, "device", request.message.reason)
            self._step(running, Aborted())

    def advance(self, job: Job, *, cancelled: bool) -> None:
        """Open, move or end a task's round, as time and the waiting devices ask."""
        eligible = self._eligible(job)
        running = self.running.get(job.task.id)
        if running is None and eligible and self._records.task(job.task.id).state is TaskState.ACTIVE:
            running = self._open(job)
        if running is not None:
            event = next_event(running, cancelled, len(eligible))
            if isinstance(event, Summed):
                self._add_sum(running)
            self._step(running, event)

    def _add_sum(self, running: Running) -> None:
        """Count every masked report that is in the sum which came out."""
        if running.secure is not None:
            for name, digest in running.secure.uploads.items():
                self._records.add_report(self._records.assignment(name), digest)
            self.folds.append((running.id, running.secure.total(running.job.plan.report)))

    def _open(self, job: Job) -> Running:
        base = self._records.snapshot(job.task)
        row_id, attempt = self._records.add_round(job.task.id, base.number + 1)
        running = Running(row_id, attempt, base, job, open_round(job.task.settings.policy, self._now))
        self.running[job.task.id] = running
        return running

    def _open_to(self, found: AssignmentRecord) -> Running:
        running = self.running.get(found.task)
        if running is None or running.id != found.round or found.state is not AssignmentState.ASSIGNED:
            raise NoLongerNeeded(f"the assignment is {found.state} and its round needs no report of it")
        if running.value.state is not RoundState.REPORTING or self._now >= running.value.deadline:
            raise NoLongerNeeded(f"round {found.number} has what it needs, or its deadline has passed")
        return running

    def _step(self, running: Running, event: Event) -> None:
        value, effects = step(running.value, event, self._now)
        if value == running.value:
            return
        cause = value.reason or type(event).__name__.lower()
        self._records.move_round(running.id, running.value, value, cause)
        after = replace(running, value=value)
        self.running[running.job.task.id] = after
        if value.state.ended:
            del self.running[running.job.task.id]
        for effect in effects:
            match effect:
                case Select(count):
                    self._select(after, count)
                case TurnAway():
                    self.turned_away += self._eligible(running.job)
                case ExpireAssignments():
                    self._records.expire_assignments(running.id, cause)

    def _select(self, running: Running, count: int) -> None:
        chosen = draw(self._eligible(running.job), count, self._source)
        seats = [Seat(secrets.token_urlsafe(16), slot, session.device) for slot, session in enumerate(chosen)]
        self._records.add_assignments(running.id, seats)
        self._step(running, Configured(len(seats)))
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
            report_within_s=policy.reporting_deadline_s,
            plan_signature=task.plan_signature,
            minimum=policy.minimum,
        )
        if task.settings.secagg is not None:
            for_all = self._invite(running.job, for_all, seats)
        for session, seat in zip(chosen, seats, strict=True):
            given = msgspec.structs.replace(for_all, assignment=seat.id, slot=seat.slot)
            self.seated[session.id] = (session, given, self._now + policy.reporting_deadline_s)

    def _invite(self, job: Job, given: Assignment, seats: Sequence[Seat]) -> Assignment:
        """Start the secure aggregation of a round: what every assignment of it says."""
        settings = job.task.settings
        invite = invitation(settings, job.plan, given, int(self._records.at + settings.policy.reporting_deadline_s))
        secure = self._secagg.open(invite, {seat.id: seat.slot for seat in seats}, Pace.of(settings, self._now))
        self.running[job.task.id] = replace(self.running[job.task.id], secure=secure)
        return msgspec.structs.replace(given, secagg=secure.invitation)

    def _eligible(self, job: Job) -> list[Session]:
        everyone = self._pool.eligible(job.task.settings.population, job.needs)
        return [session for session in everyone if session.id not in self.seated]
