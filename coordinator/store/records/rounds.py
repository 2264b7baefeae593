"""Rows of attempts, of the devices that took part, and of the privacy ledger, within one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Set as AbstractSet

import msgspec
from sqlalchemy import ColumnElement, Select, String, case, cast, func, insert, select, union

from coordinator.errors import UnknownAssignment
from coordinator.rules.entities import AssignedDevice, AssignmentRecord, NoiseSource, Spent, Task
from coordinator.rules.rounds import FAILURES, HELD_UP
from coordinator.rules.states import AssignmentState, LeftOut, RoundState, TaskState
from coordinator.store.records.rows import Part, reader, task_of
from coordinator.store.tables import ASSIGNMENTS, LEDGER, REPORTS, ROUNDS, TASKS, TRANSITIONS
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
