"""Rows of attempts, of devices that took part, of the privacy ledger, of sessions, leases and notices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set as AbstractSet
from dataclasses import asdict
from typing import NamedTuple

import msgspec
from sqlalchemy import (
    ColumnElement,
    Select,
    String,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    select,
    true,
    union,
    update,
)

from coordinator.errors import LeaseLost, UnknownAssignment
from coordinator.rules.entities import AssignedDevice, AssignmentRecord, Device, NoiseSource, SessionShape, Spent, Task
from coordinator.rules.replicas import Lease, Replica
from coordinator.rules.rounds import FAILURES, HELD_UP
from coordinator.rules.states import AssignmentState, LeftOut, RoundState, TaskState
from coordinator.store.records.rows import Counts, Part, adding, reader, task_of
from coordinator.store.tables import (
    ASSIGNMENTS,
    DEVICES,
    LEDGER,
    NOTICES,
    POPULATIONS,
    REPLICAS,
    REPORTS,
    ROUNDS,
    SESSION_SHAPES,
    TALLIES,
    TASKS,
    TRANSITIONS,
)
from fedcore.privacy.settings import LedgerEntry
from fedcore.validation import converter
from fedcore.wire.messages import Settled

assignment_of = reader(AssignmentRecord)


class AttemptRecords(Part):
    """The queries; nothing is written."""

    def failures(self, task_id: str, number: int) -> int:
        """Failed attempts at round `number` since the task was last made active."""
        since = ROUNDS.c.ended_at > self._made_active(task_id)
        failed = (ROUNDS.c.task == task_id) & (ROUNDS.c.number == number) & ROUNDS.c.reason.in_(sorted(FAILURES))
        return self._connection.scalar(select(func.count()).where(failed & since)) or 0

    def states(self, row_ids: Iterable[int]) -> dict[int, RoundState]:
        """How far rounds are, by row id; without those that are no more."""
        these = list(row_ids)
        if not these:
            return {}
        query = select(ROUNDS.c.id, ROUNDS.c.state).where(ROUNDS.c.id.in_(these))
        return {row.id: RoundState(row.state) for row in self._connection.execute(query)}

    def reporting(self, task_id: str) -> tuple[int, int] | None:
        """Row id and number of the round of a task that takes reports; None while there is none."""
        query = select(ROUNDS.c.id, ROUNDS.c.number)
        open_ = (ROUNDS.c.task == task_id) & (ROUNDS.c.state == RoundState.REPORTING)
        row = self._connection.execute(query.where(open_)).one_or_none()
        return None if row is None else (row.id, row.number)

    def receipts(self, row_id: int) -> int:
        """How many reports of a round have a receipt, at whichever replica."""
        return self._connection.scalar(select(func.count()).where(REPORTS.c.round == row_id)) or 0

    def pairs_begun_again(self, task: Task) -> int:
        """Second trips in a row whose cohort was gone, since the last one that counted or the task was made active."""
        counted = committed_by_devices(task.id) & (ROUNDS.c.number % 2 == 0)
        after = self._connection.scalar(select(func.max(ROUNDS.c.number)).where(counted)) or 0
        gone = (ROUNDS.c.task == task.id) & (ROUNDS.c.reason == "cohort-gone") & (ROUNDS.c.number > after)
        since = ROUNDS.c.ended_at > self._made_active(task.id)
        return self._connection.scalar(select(func.count()).where(gone & since)) or 0

    def first_metrics(self, task_id: str, most: int) -> list[dict[str, float]]:
        """The metrics of the first rounds since a task was last made active."""
        return [*self._connection.scalars(self._metrics(task_id).order_by(ROUNDS.c.number).limit(most))]

    def latest_metrics(self, task_id: str, most: int) -> list[dict[str, float]]:
        """The metrics of the last rounds since a task was last made active, the newest last."""
        latest = self._metrics(task_id).order_by(ROUNDS.c.number.desc()).limit(most)
        return [*reversed(self._connection.scalars(latest).all())]

    def of_one_task(self, checkpoints: AbstractSet[str]) -> bool:
        """Whether one task has all of these checkpoints, among those that are kept."""
        first = select(TASKS.c.id.label("task"), TASKS.c.checkpoint_sha256)
        later = select(ROUNDS.c.task, ROUNDS.c.checkpoint_sha256)
        these = [query.where(query.selected_columns[1].in_(checkpoints)) for query in (first, later)]
        kept = union(*these).subquery()
        owners = select(kept.c.task).group_by(kept.c.task).having(func.count() == len(checkpoints))
        return self._connection.scalar(owners.limit(1)) is not None

    def ancestors(self, population: str, checkpoint: str, starts_from: str | None = None) -> list[Task]:
        """The tasks of a population that trained a checkpoint, one after the other, as long as they keep their models.

        A task that left the model as it was is none of them. starts_from: where the checkpoint's model is said to be
        from, which holds for ever.
        """
        found: dict[str, Task] = {}
        ends = [(checkpoint, starts_from)]
        while ends:
            end, source = ends.pop()
            made = select(ROUNDS.c.task).where(ROUNDS.c.checkpoint_sha256 == end)
            trained = TASKS.c.id.in_(made) & (TASKS.c.checkpoint_sha256 != end)
            named = TASKS.c.id == (source or "").partition("@")[0]
            there = (TASKS.c.population == population) & TASKS.c.id.not_in(list(found))
            tasks = self._all(task_of, select(TASKS).where(there & (trained | named)))
            found |= {task.id: task for task in tasks}
            ends += [(task.initial.checkpoint_sha256, task.settings.starts_from) for task in tasks]
        return list(found.values())

    def _metrics(self, task_id: str) -> Select[dict[str, float]]:
        """Of the committed rounds since a task was last made active."""
        since = ROUNDS.c.ended_at > self._made_active(task_id)
        return select(ROUNDS.c.metrics).where(committed_by_devices(task_id) & since)

    def _made_active(self, task_id: str) -> float:
        """When a task was last made active."""
        of_task = (TRANSITIONS.c.entity == "task") & (TRANSITIONS.c.entity_id == task_id)
        # A rollback leaves an active task as it is.
        became_active = (TRANSITIONS.c.to_state == TaskState.ACTIVE) & (TRANSITIONS.c.from_state != TaskState.ACTIVE)
        return self._connection.scalar(select(func.max(TRANSITIONS.c.at)).where(of_task & became_active)) or 0.0


def committed_by_devices(task_id: str) -> ColumnElement[bool]:
    """The committed rounds of a task, but for rollbacks."""
    return (ROUNDS.c.task == task_id) & (ROUNDS.c.state == RoundState.COMMITTED) & (ROUNDS.c.reported > 0)


_OF_ASSIGNMENT = REPORTS.c.assignment == ASSIGNMENTS.c.id
ASSIGNED_ROWS = (
    select(
        ASSIGNMENTS,
        ROUNDS.c.task,
        ROUNDS.c.number,
        TASKS.c.plan_sha256,
        REPORTS.c.sha256.label("report_sha256"),
    )
    .select_from(ASSIGNMENTS.join(ROUNDS).join(TASKS, ROUNDS.c.task == TASKS.c.id).outerjoin(REPORTS, _OF_ASSIGNMENT))
    .order_by(ASSIGNMENTS.c.slot)
)
_SUMS = ROUNDS.alias()
_OF_REPORT = REPORTS.c.round == _SUMS.c.id


class CohortRecords(Part):
    """The queries; nothing is written."""

    def drawn(self, task_id: str, number: int, attempt: int) -> list[AssignmentRecord]:
        """The assignments of one attempt at a round, by slot."""
        where = (ROUNDS.c.task == task_id) & (ROUNDS.c.number == number) & (ROUNDS.c.attempt == attempt)
        return self._all(assignment_of, ASSIGNED_ROWS.where(where))

    def counted(self, task_id: str, number: int, attempt: int) -> list[AssignmentRecord]:
        """The assignments whose reports are in the sum of one attempt at a round, by number and slot.

        Those of a buffered round may have been drawn by earlier ones, as their numbers say.
        """
        this = (_SUMS.c.task == task_id) & (_SUMS.c.number == number) & (_SUMS.c.attempt == attempt)
        query = (
            ASSIGNED_ROWS.where(REPORTS.c.round.in_(select(_SUMS.c.id).where(this)))
            .order_by(None)
            .order_by(ROUNDS.c.number, ASSIGNMENTS.c.slot)
        )
        return self._all(assignment_of, query)

    def at_work(self, task_id: str, numbers: range) -> list[AssignedDevice]:
        """The open assignments of a task's rounds of these numbers.

        In a transaction that writes, no replica counts a report of theirs before it ends.
        """
        within = (ROUNDS.c.number >= numbers.start) & (ROUNDS.c.number < numbers.stop)
        rounds = select(ROUNDS.c.id).where((ROUNDS.c.task == task_id) & within)
        open_ = ASSIGNMENTS.c.round.in_(rounds) & (ASSIGNMENTS.c.state == AssignmentState.ASSIGNED)
        query = self._held(select(ASSIGNMENTS.c.id, ASSIGNMENTS.c.slot, ASSIGNMENTS.c.device).where(open_), ASSIGNMENTS)
        return [AssignedDevice(*row) for row in self._connection.execute(query)]

    def settled(self, assignment_id: str) -> Settled:
        """What became of the round of an assignment, and of its task. Raises UnknownAssignment."""
        summed = ASSIGNMENTS.outerjoin(REPORTS, _OF_ASSIGNMENT)
        summed = summed.join(ROUNDS, ROUNDS.c.id == func.coalesce(REPORTS.c.round, ASSIGNMENTS.c.round))
        columns = (ASSIGNMENTS.c.state, ROUNDS.c.state, TASKS.c.state)
        query = select(*columns).select_from(summed.join(TASKS)).where(ASSIGNMENTS.c.id == assignment_id)
        row = self._connection.execute(query).one_or_none()
        if row is None:
            raise UnknownAssignment("there is no such assignment; check in again")
        assigned, round_, task = AssignmentState(row[0]), RoundState(row[1]), TaskState(row[2])
        reported, open_ = assigned is AssignmentState.REPORTED, assigned is AssignmentState.ASSIGNED
        waits = open_ or (reported and not round_.ended)
        return Settled(counted=None if waits else reported and round_ is RoundState.COMMITTED, over=task.ended)

    def counted_devices(self, task_id: str, number: int) -> frozenset[str]:
        """The devices whose reports a committed round counted, of a task whose rounds draw cohorts."""
        of_round = (ROUNDS.c.task == task_id) & (ROUNDS.c.number == number)
        counted = of_round & (ASSIGNMENTS.c.state == AssignmentState.REPORTED)
        query = select(ASSIGNMENTS.c.device).join(ROUNDS).where(counted & (ROUNDS.c.state == RoundState.COMMITTED))
        return frozenset(self._connection.scalars(query))

    def unreliable_devices(self, task_id: str, since: int, *, buffered: bool) -> dict[str, int]:
        """Devices that brought no report to round `since` or later, nor one after it, and the number of the last such.

        In rounds that draw a cohort, those that gave up or were lost count only where they ended the round: of any
        other they held up nothing.
        """
        silent: ColumnElement[bool] = ASSIGNMENTS.c.state.in_((AssignmentState.ABORTED, AssignmentState.LOST))
        if not buffered:
            of_round = (TRANSITIONS.c.entity == "round") & (TRANSITIONS.c.entity_id == cast(ROUNDS.c.id, String))
            ends = (TRANSITIONS.c.from_state == RoundState.REPORTING) & TRANSITIONS.c.cause.in_(sorted(HELD_UP))
            silent = silent & select(TRANSITIONS.c.id).where(of_round & ends).exists()
        silent |= (ASSIGNMENTS.c.state == AssignmentState.EXPIRED) | (ASSIGNMENTS.c.reason == LeftOut.SUSPECTED)
        reported = ASSIGNMENTS.c.state == AssignmentState.REPORTED
        last, again = (func.max(case((how, ROUNDS.c.id), else_=0)) for how in (silent, reported))
        query = select(ASSIGNMENTS.c.device, func.max(case((silent, ROUNDS.c.number)))).join(ROUNDS)
        lately = (ROUNDS.c.task == task_id) & (ROUNDS.c.number >= since)
        rows = self._connection.execute(query.where(lately).group_by(ASSIGNMENTS.c.device).having(last > again))
        return {row[0]: row[1] for row in rows}

    def participations(self, task_id: str, numbers: range, since: float) -> list[tuple[str, float, int]]:
        """Devices that took part, and stayed, in these rounds or later ones, or in some that ended after `since`.

        Device, time of its last assignment in seconds since 1970, and number of that round. numbers: rounds up to the
        last committed one. Of an abandoned attempt at a committed round those count that further attempts left out, or
        that went on after it.
        """
        gone = ASSIGNMENTS.c.state.in_((AssignmentState.ABORTED, AssignmentState.LOST))
        goes_on = (ASSIGNMENTS.c.state == AssignmentState.ASSIGNED) | (_SUMS.c.state != RoundState.ABANDONED)
        stayed = ~gone & ((ROUNDS.c.state != RoundState.ABANDONED) | goes_on)
        left_out = ASSIGNMENTS.c.reason.in_(list(LeftOut)) & (ROUNDS.c.number < numbers.stop)
        counting = (ROUNDS.c.task == task_id) & (stayed | left_out)
        lately = (ROUNDS.c.number >= numbers.start) | (ROUNDS.c.ended_at > since) | ROUNDS.c.ended_at.is_(None)
        columns = (ASSIGNMENTS.c.device, func.max(ASSIGNMENTS.c.assigned_at), func.max(ROUNDS.c.number))
        summed = ASSIGNMENTS.join(ROUNDS).outerjoin(REPORTS, _OF_ASSIGNMENT).outerjoin(_SUMS, _OF_REPORT)
        query = select(*columns).select_from(summed).where(counting & lately)
        return [(row[0], row[1], row[2]) for row in self._connection.execute(query.group_by(ASSIGNMENTS.c.device))]


_entry = converter(LedgerEntry)


class LedgerRecords(Part):
    """The operations on the ledger."""

    def append(self, task: str, entry: LedgerEntry, epsilon: float, source: NoiseSource | None) -> None:
        """Add the row of a round whose noisy sum this transaction releases.

        epsilon: what the task has spent with it. source: of its noise, where later rounds need that again.
        """
        values = {"number": entry.round, "entry": msgspec.to_builtins(entry), "epsilon": epsilon}
        if source is not None:
            values |= {"nonce": source.nonce.hex(), "signer": source.signer}
        self._connection.execute(insert(LEDGER).values(task=task, **values))

    def entries(self, task: str, last: int | None = None) -> tuple[LedgerEntry, ...]:
        """The rows of a task in order, up to round `last` if that is given."""
        query = select(LEDGER.c.entry).where(LEDGER.c.task == task)
        if last is not None:
            query = query.where(LEDGER.c.number <= last)
        return tuple(_entry(row) for row in self._connection.scalars(query.order_by(LEDGER.c.number)))

    def sources(self, task: str) -> tuple[NoiseSource, ...]:
        """The sources of the noise of a task's rounds that were kept, in order."""
        kept = (LEDGER.c.task == task) & LEDGER.c.nonce.is_not(None)
        query = select(LEDGER.c.nonce, LEDGER.c.signer).where(kept).order_by(LEDGER.c.number)
        return tuple(NoiseSource(bytes.fromhex(row.nonce), row.signer) for row in self._connection.execute(query))

    def spent(self, task: str) -> list[Spent]:
        """What a task had spent after each of its private rounds, in order."""
        query = select(LEDGER.c.number, LEDGER.c.epsilon).where(LEDGER.c.task == task).order_by(LEDGER.c.number)
        return [Spent(row.number, row.epsilon) for row in self._connection.execute(query)]


# Rows of devices, counts of their sessions, leases of replicas and their notices, within one transaction.


_DEVICES = select(DEVICES, (DEVICES.c.algorithm + ":" + DEVICES.c.public_key).label("key"))
_device, _shape = reader(Device), reader(SessionShape)


class DeviceRecords(Part):
    """The operations on devices."""

    def find(self, device_id: str) -> Device | None:
        """An enrolled device; None when none has this id."""
        return self._one(_device, _DEVICES.where(DEVICES.c.id == device_id))

    def add(self, device_id: str, key: str, attestation: str) -> None:
        """Enrol a device under its public key (as text)."""
        algorithm, _, public_key = key.partition(":")
        values = {"algorithm": algorithm, "public_key": public_key, "attestation": attestation}
        self._connection.execute(insert(DEVICES).values(id=device_id, **values, enrolled_at=self.at))

    def newest(self, limit: int, *, revoked: bool) -> list[Device]:
        """The devices that enrolled last, the newest first; or those that were revoked, the last one first."""
        query = _DEVICES.order_by(DEVICES.c.enrolled_at.desc(), DEVICES.c.id)
        if revoked:
            query = _DEVICES.where(DEVICES.c.revoked_at.is_not(None)).order_by(DEVICES.c.revoked_at.desc())
        return self._all(_device, query.limit(limit))

    def counts(self) -> tuple[int, int]:
        """How many devices are enrolled, and how many of them are revoked."""
        enrolled, revoked = self._connection.execute(select(func.count(), func.count(DEVICES.c.revoked_at))).one()
        return enrolled, revoked

    def set_revoked(self, device_id: str, *, revoked: bool) -> bool:
        """Revoke a device, or allow it again; whether that changed anything."""
        this, already = DEVICES.c.id == device_id, DEVICES.c.revoked_at.is_not(None)
        change = update(DEVICES).where(this & (~already if revoked else already))
        return self._connection.execute(change.values(revoked_at=self.at if revoked else None)).rowcount == 1


_ADD = adding(SESSION_SHAPES)


class SessionCountRecords(Part):
    """The operations on session counts."""

    def add(self, counts: Counts) -> None:
        """Add to the counts."""
        if counts:
            names = ("population", "task", "shape", "count")
            rows = [dict(zip(names, (*key, count), strict=True)) for key, count in counts.items()]
            self._connection.execute(_ADD[self._connection.dialect.name], rows)

    def of_population(self, population: str) -> list[SessionShape]:
        """The counts of a population, with its tasks and without one."""
        query = select(SESSION_SHAPES).where(SESSION_SHAPES.c.population == population)
        return self._all(_shape, query)

    def of(self, task: Task) -> list[SessionShape]:
        """The counts of a task, and those of its population without a task; most frequent first."""
        mine = (SESSION_SHAPES.c.population == task.settings.population) & SESSION_SHAPES.c.task.in_(("", task.id))
        query = select(SESSION_SHAPES).where(mine).order_by(SESSION_SHAPES.c["count"].desc(), SESSION_SHAPES.c.shape)
        return self._all(_shape, query)


_HELD = select(POPULATIONS.c.name, POPULATIONS.c.term).where(POPULATIONS.c.holder == bindparam("by"))
_HELD = _HELD.with_for_update(read=True)
_REPLICAS = select(*(REPLICAS.c[name] for name in Replica.__dataclass_fields__))
_LEASES = select(*(POPULATIONS.c[name] for name in ("name", *Lease._fields[1:]))).order_by(POPULATIONS.c.name)


class LeaseRecords(Part):
    """The operations on these rows."""

    def replicas(self) -> list[Replica]:
        """Every replica with a row."""
        return [Replica(*row) for row in self._connection.execute(_REPLICAS)]

    def seen_since(self, at: float) -> list[str]:
        """The URLs of the replicas that have beaten since then, by their own clocks."""
        return list(self._connection.scalars(select(REPLICAS.c.url).where(REPLICAS.c.seen_at > at)))

    def leases(self) -> list[Lease]:
        """The lease of every population, by name."""
        return [Lease(*row) for row in self._connection.execute(_LEASES)]

    def announce(self, me: Replica) -> None:
        """Write a replica's row. Raises IntegrityError when there is one with its URL: see `succeed`."""
        self._connection.execute(insert(REPLICAS).values(**asdict(me), seen_at=self.at))

    def succeed(self, me: Replica) -> None:
        """Write a replica's row in place of the row with its URL, which sets that replica's populations free."""
        values, new = {**asdict(me), "seen_at": self.at}, self._insert_unless(REPLICAS)
        self._connection.execute(new.on_conflict_do_update(index_elements=["url"], set_=values), values)

    def beat(self, me: Replica) -> bool:
        """Write that `me` lives; false when its row is gone: another replica declared it gone."""
        values = {"beat": me.beat, "draining": me.draining, "seen_at": self.at, "steady": me.steady}
        return self._connection.execute(update(REPLICAS).where(REPLICAS.c.id == me.id).values(**values)).rowcount == 1

    def forget(self, replica: str, beat: int | None = None) -> None:
        """Remove a replica's row, which sets its populations free; with `beat`, only if it has not moved on."""
        same = true() if beat is None else REPLICAS.c.beat == beat
        self._connection.execute(delete(REPLICAS).where((REPLICAS.c.id == replica) & same))

    def take(self, lease: Lease, holder: str) -> bool:
        """Give `holder` a lease that no present replica holds; false when another one was first."""
        present = select(REPLICAS.c.id).where(REPLICAS.c.id != holder)
        free = POPULATIONS.c.holder.is_(None) | POPULATIONS.c.holder.not_in(present)
        values = {"holder": holder, "term": lease.term + 1}
        query = update(POPULATIONS).where(_of(lease) & free).values(**values)
        return self._connection.execute(query).rowcount == 1

    def release(self, lease: Lease) -> None:
        """Release a lease. Its term stays, so that no replica ever holds it under the same term."""
        self._connection.execute(update(POPULATIONS).where(_of(lease)).values(holder=None))

    def fence(self, holder: str, held: Mapping[str, int]) -> None:
        """Hold every lease of `held` (terms by population) until the transaction ends.

        Raises LeaseLost when another replica took one: then nothing may be written that depends on it.
        """
        # Because of the lock, a replica that takes a lease waits for this transaction, or this one sees it taken.
        # SQLite needs no lock: one transaction writes at a time.
        terms = {row.name: row.term for row in self._connection.execute(_HELD, {"by": holder})}
        lost = {population for population, term in held.items() if terms.get(population) != term}
        if lost:
            raise LeaseLost(frozenset(lost))


def _of(lease: Lease) -> ColumnElement[bool]:
    return (POPULATIONS.c.name == lease.population) & (POPULATIONS.c.term == lease.term)


# Made once, and so compiled once: these are asked several times a second.
_VERSIONS = select(NOTICES.c.population, NOTICES.c.version)
_NOTICES = select(NOTICES).where(NOTICES.c.population.in_(bindparam("populations", expanding=True)))
_THESE = TALLIES.c.population.in_(bindparam("populations", expanding=True))
_ANY = select(TALLIES.c.id).where(_THESE).limit(1)
_TAKE = delete(TALLIES).where(_THESE).returning(TALLIES.c.id, TALLIES.c.population, TALLIES.c.said)


class StoredNotice(NamedTuple):
    """A notice of a population, and the replica that wrote it. version: another for every other text."""

    population: str
    replica: str
    version: int
    said: str


class NoticeRecords(Part):
    """The operations on notices and tallies."""

    def changed(self, known: Mapping[str, int]) -> list[StoredNotice]:
        """The notices that have another version than is known, by population."""
        changed = [row[0] for row in self._connection.execute(_VERSIONS) if known.get(row[0]) != row[1]]
        if not changed:
            return []
        return [StoredNotice(*row) for row in self._connection.execute(_NOTICES, {"populations": changed})]

    def publish(self, population: str, replica: str, said: str) -> None:
        """Write a driver's notice in place of the last one."""
        values = {"population": population, "replica": replica, "version": 1, "said": said}
        changed = {"replica": replica, "version": NOTICES.c.version + 1, "said": said}
        new = self._insert_unless(NOTICES).on_conflict_do_update(index_elements=["population"], set_=changed)
        self._connection.execute(new, values)

    def tell(self, tallies: Iterable[tuple[str, str]]) -> None:
        """Leave tallies, each of a population, to its driver."""
        for population, said in tallies:
            self._connection.execute(insert(TALLIES).values(population=population, said=said))

    def any_told(self, populations: Iterable[str]) -> bool:
        """Whether there are tallies of these populations."""
        return self._connection.execute(_ANY, {"populations": list(populations)}).first() is not None

    def take(self, populations: Iterable[str]) -> list[tuple[str, str]]:
        """The tallies of these populations, in the order in which they came, which are deleted."""
        rows = sorted(self._connection.execute(_TAKE, {"populations": list(populations)}))
        return [(row.population, row.said) for row in rows]
