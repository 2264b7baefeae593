"""Rows as typed values, within one transaction. Every change of state leaves a transition."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property
from typing import Any

import msgspec
from sqlalchemy import Row, Table, Update, bindparam, func, insert, select, update

from coordinator.errors import StoreConflict, UnknownAssignment, UnknownBlob, UnknownRound, UnknownTask
from coordinator.rules.buffers import drawn_in
from coordinator.rules.entities import AssignedDevice, AssignmentRecord, RoundRecord, Snapshot, Task, Transition
from coordinator.rules.kinds import rounds_after
from coordinator.rules.progress import Progress, explain
from coordinator.rules.rounds import Round
from coordinator.rules.states import AssignmentState, LeftOut, RoundState, TaskState, move
from coordinator.store.records import models as model_rows, operators, rounds as round_rows
from coordinator.store.records.overview import OverviewRecords
from coordinator.store.records.rounds import DeviceRecords, LeaseRecords, NoticeRecords, SessionCountRecords
from coordinator.store.records.rows import (
    COUNTS,
    ROUND_ROWS,
    WithinTransaction,
    columns_of,
    columns_of_task,
    reader,
    round_of,
    settings_of,
    slices,
    task_of,
)
from coordinator.store.tables import ASSIGNMENTS, BLOBS, POPULATIONS, REPORTS, ROUNDS, TASKS, TRANSITIONS
from fedcore.plan import BlobRef
from fedcore.release import Signed

_snapshot = reader(Snapshot)
_CONFLICT = "a row of {} is no longer {}: does another coordinator use this store?"
# Made once, and so compiled once: to build a statement anew costs more than to execute it.
_THESE = ASSIGNMENTS.c.id.in_(bindparam("ids", expanding=True))
_GIVEN = round_rows.ASSIGNED_ROWS.where(_THESE).with_for_update(of=ASSIGNMENTS, key_share=True)
_REPORT = (
    update(ASSIGNMENTS)
    .where(_THESE & (ASSIGNMENTS.c.state == AssignmentState.ASSIGNED))
    .values(state=AssignmentState.REPORTED, reason="")
)
_TASKS = (
    select(TASKS).where(TASKS.c.state.in_(bindparam("states", expanding=True))).order_by(TASKS.c.created_at, TASKS.c.id)
)


class Records(WithinTransaction):
    """One transaction, with the rows of every kind.

    A task or an assignment that is read in a `writing` transaction does not change until its end: its writes depend on
    it. SQLite has one writer anyway; PostgreSQL locks the row.
    """

    identity = cached_property(model_rows.IdentityRecords)
    leases = cached_property(LeaseRecords)
    tokens = cached_property(operators.TokenRecords)
    devices = cached_property(DeviceRecords)
    audit = cached_property(operators.AuditRecords)
    releases = cached_property(model_rows.ReleaseRecords)
    overview = cached_property(OverviewRecords)
    notices = cached_property(NoticeRecords)
    observations = cached_property(operators.ObservationRecords)
    garbage = cached_property(model_rows.GarbageRecords)
    sessions = cached_property(SessionCountRecords)
    cohorts = cached_property(round_rows.CohortRecords)
    attempts = cached_property(round_rows.AttemptRecords)
    ledger = cached_property(round_rows.LedgerRecords)
    sealed = cached_property(model_rows.SealedRecords)
    models = cached_property(model_rows.ModelRecords)
    alerts = cached_property(operators.AlertRecords)
    budgets = cached_property(operators.BudgetRecords)
    uploads = cached_property(operators.UploadRecords)

    # --- tasks and blobs

    def populations(self) -> frozenset[str]:
        """Every name that devices may check in under."""
        return frozenset(self._connection.scalars(select(POPULATIONS.c.name).where(self._shown(POPULATIONS.c.name))))

    def add_blob(self, ref: BlobRef, *, public: bool) -> None:
        """Make a durable file known. Once public, a blob stays so: equal bytes may serve two purposes."""
        self._insert_if_absent(
            BLOBS, sha256=ref.sha256, size=ref.size, public=public, created_at=self.at, unneeded_at=None
        )
        this = BLOBS.c.sha256 == ref.sha256
        if public:
            self._connection.execute(update(BLOBS).where(this & ~BLOBS.c.public).values(public=True))
        again = this & BLOBS.c.unneeded_at.is_not(None)
        self._connection.execute(update(BLOBS).where(again).values(unneeded_at=None))

    def blob(self, sha256: str, *, public: bool) -> BlobRef:
        """A known blob, by digest; with `public`, only one that devices may have. Raises UnknownBlob."""
        row = self._connection.execute(select(BLOBS).where(BLOBS.c.sha256 == sha256)).one_or_none()
        if row is None or (public and not row.public):
            raise UnknownBlob(f"there is no blob {sha256[:12]}… for devices")
        return BlobRef(row.sha256, row.size)

    def add_task(self, task: Task, cause: str) -> None:
        """Write a new task, and its population when it is the first there."""
        self._insert_if_absent(POPULATIONS, name=task.settings.population, created_at=self.at, holder=None, term=0)
        self._insert(TASKS, **columns_of_task(task))
        self._transition("task", task.id, "", task.state, cause)

    def tasks(self, *states: TaskState) -> list[Task]:
        """Every task, oldest first; with `states`, those in one of them."""
        query = _TASKS if self._only is None else _TASKS.where(self._shown(TASKS.c.population))
        return self._all(task_of, query, {"states": list(states or TaskState)})

    def progress(self, tasks: Sequence[Task]) -> list[Progress]:
        """Why each of these tasks is where it is."""
        some_of = ((some, self.overview.live([task.id for task in some])) for some in slices(tasks))
        situations = self.observations.situations
        return [explain(status, self.at) for some, live in some_of for status in situations(some, live)]

    def task(self, task_id: str) -> Task:
        """One task. Raises UnknownTask."""
        this = (TASKS.c.id == task_id) & self._shown(TASKS.c.population)
        task = self._one(task_of, self._held(select(TASKS).where(this), TASKS))
        if task is None:
            raise UnknownTask(f"there is no task {task_id!r}; `muster task list` has the ids")
        return task

    def move_task(self, task: Task, to: TaskState, cause: str, reason: str = "") -> None:
        """Change a task's state. Raises StoreConflict when it is no longer the one in `task`."""
        values = {"state": move(task.state, to), "reason": reason}
        self._guarded(TASKS, task.id, task.state, values)
        self._transition("task", task.id, task.state, to, cause)

    def history(self, task: Task) -> list[Transition]:
        """Every change of a task's state, in order, with its cause."""
        of_task = (TRANSITIONS.c.entity == "task") & (TRANSITIONS.c.entity_id == task.id)
        columns = (TRANSITIONS.c.from_state, TRANSITIONS.c.to_state, TRANSITIONS.c.cause, TRANSITIONS.c.at)
        query = select(*columns).where(of_task).order_by(TRANSITIONS.c.id)
        return [Transition(*row) for row in self._connection.execute(query)]

    def snapshot(self, task: Task, number: int | None = None) -> Snapshot:
        """The model after committed round `number`, by default the last one; 0 is the start. Raises UnknownRound."""
        columns = (ROUNDS.c.number, ROUNDS.c.state_sha256, ROUNDS.c.checkpoint_sha256, ROUNDS.c.lineage)
        query = select(*columns).where((ROUNDS.c.task == task.id) & ROUNDS.c.checkpoint_sha256.is_not(None))
        if number is not None:
            query = query.where(ROUNDS.c.number == number)
        snapshot = self._one(_snapshot, query.order_by(ROUNDS.c.number.desc()).limit(1))
        if number and snapshot is None:
            raise UnknownRound(f"task {task.id} has not committed a round {number}, or its model is no longer kept")
        return snapshot or task.initial

    def made_in(self, task: Task, snapshot: Snapshot) -> int:
        """The number of the round whose devices made a server state, which a rollback may have copied; 0 for none."""
        by_devices = round_rows.committed_by_devices(task.id) & (ROUNDS.c.state_sha256 == snapshot.state_sha256)
        return self._connection.scalar(select(func.max(ROUNDS.c.number)).where(by_devices)) or 0

    # --- rounds

    def roll_back(self, task: Task, to: Snapshot, lineage: Signed | None, cause: str) -> None:
        """Commit the next round of a task, without devices and with the model of an earlier one.

        Numbers never go back: devices refuse rounds that are older than those which they know. The task gets as many
        rounds more as it lost, up to MOST_COUNT in all.
        """
        number = self.snapshot(task).number + 1
        values: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "staleness": [], "reason": cause, "metrics": {}}
        values |= {"state_sha256": to.state_sha256, "checkpoint_sha256": to.checkpoint_sha256}
        values |= {"lineage": msgspec.to_builtins(lineage)}
        values |= {"task": task.id, "number": number, "attempt": self._next_attempt(task.id, number)}
        row_id = self._insert(ROUNDS, state=RoundState.COMMITTED, opened_at=self.at, ended_at=self.at, **values)
        self._transition("round", row_id, "", RoundState.COMMITTED, cause)
        rounds = rounds_after(task.settings.rounds, number, to.number)
        self._guarded(TASKS, task.id, task.state, columns_of(replace(task.settings, rounds=rounds)))
        self._transition("task", task.id, task.state, task.state, cause)

    def add_round(self, task_id: str, number: int, value: Round) -> tuple[int, int]:
        """Write a new round; answers its row id and its attempt, one more than the last."""
        attempt = self._next_attempt(task_id, number)
        values = _values(value) | {"metrics": {}}
        values |= {"task": task_id, "number": number, "attempt": attempt, "opened_at": self.at}
        row_id = self._insert(ROUNDS, **values)
        self._transition("round", row_id, "", value.state, "devices are waiting")
        return row_id, attempt

    def release_round(self, row_id: int, task_id: str, number: int) -> int:
        """Let a held round begin as `number`, from now on; answers its attempt.

        It was opened behind a round that has ended since: had that one been abandoned, this is its next attempt.
        """
        row = self._connection.execute(select(ROUNDS.c.number, ROUNDS.c.attempt).where(ROUNDS.c.id == row_id)).one()
        attempt: int = row.attempt if row.number == number else self._next_attempt(task_id, number)
        values = {"number": number, "attempt": attempt, "opened_at": self.at}
        self._guarded(ROUNDS, row_id, RoundState.SELECTING, values)
        self._transition("round", row_id, RoundState.SELECTING, RoundState.SELECTING, "released")
        return attempt

    def _next_attempt(self, task_id: str, number: int) -> int:
        same = (ROUNDS.c.task == task_id) & (ROUNDS.c.number == number)
        return (self._connection.scalar(select(func.max(ROUNDS.c.attempt)).where(same)) or 0) + 1

    def move_round(self, row_id: int, before: Round, after: Round, cause: str) -> None:
        """Write a round's counts and state. Raises StoreConflict when the stored state is not that of `before`."""
        values = _values(after)
        if after.state.ended:
            values["ended_at"] = self.at
        self._guarded(ROUNDS, row_id, before.state, values)
        if after.state is not before.state:
            self._transition("round", row_id, before.state, after.state, cause)

    def finish_round(self, row_id: int, snapshot: Snapshot, metrics: dict[str, float]) -> None:
        """Write the result of a committed round."""
        values: dict[str, Any] = {"lineage": msgspec.to_builtins(snapshot.lineage), "metrics": metrics}
        values |= {"state_sha256": snapshot.state_sha256, "checkpoint_sha256": snapshot.checkpoint_sha256}
        self._connection.execute(update(ROUNDS).where(ROUNDS.c.id == row_id).values(**values))

    def abandon_unfinished_rounds(
        self, populations: Collection[str], reason: str, in_memory: Mapping[int, Round] | None = None
    ) -> tuple[int, set[int]]:
        """End every round of `populations` that runs but for those that are as in `in_memory`, by row id.

        Answers how many, and which go on.
        """
        running = ROUNDS.c.state.in_([state for state in RoundState if not state.ended])
        columns = (ROUNDS, TASKS.c.population, TASKS.c.settings)
        query = select(*columns).join(TASKS).where(running & TASKS.c.population.in_(populations))
        ended, go_on = 0, set()
        for row in self._connection.execute(query).all():
            if in_memory and _agrees(row, in_memory.get(row.id)):
                go_on.add(row.id)
                continue
            values = {"state": RoundState.ABANDONED, "reason": reason, "ended_at": self.at}
            self._guarded(ROUNDS, row.id, row.state, values)
            self._transition("round", row.id, row.state, RoundState.ABANDONED, reason)
            settings = settings_of(row.task, row.population, row.settings)
            numbers = drawn_in(row.number, settings.max_staleness)
            self.end_assignments(row.task, numbers, AssignmentState.NOT_NEEDED, reason)
            ended += 1
        return ended, go_on

    def rounds(self, task_id: str) -> list[RoundRecord]:
        """A task's rounds, every attempt, in order."""
        query = ROUND_ROWS.where(ROUNDS.c.task == task_id).order_by(ROUNDS.c.number, ROUNDS.c.attempt)
        aborts = self._abort_reasons(task_id)
        return [replace(round_, abort_reasons=aborts.get(round_.id, {})) for round_ in self._all(round_of, query)]

    def _abort_reasons(self, task_id: str) -> dict[int, dict[str, int]]:
        """Aborted assignments by reason, of every round of a task that has any."""
        given_up = (ROUNDS.c.task == task_id) & (ASSIGNMENTS.c.state == AssignmentState.ABORTED)
        columns = (ASSIGNMENTS.c.round, ASSIGNMENTS.c.reason)
        query = select(*columns, func.count()).join(ROUNDS).where(given_up).group_by(*columns).order_by(*columns)
        reasons: dict[int, dict[str, int]] = {}
        for round_id, reason, count in self._connection.execute(query):
            reasons.setdefault(round_id, {})[reason] = count
        return reasons

    # --- assignments and reports

    def add_assignments(self, round_id: int, new: Sequence[AssignedDevice]) -> None:
        """Write the assignments of devices that were drawn."""
        shared = {"round": round_id, "state": AssignmentState.ASSIGNED, "reason": "", "assigned_at": self.at}
        self._connection.execute(insert(ASSIGNMENTS), [asdict(device) | shared for device in new])
        self._transitions("assignment", [device.id for device in new], "", AssignmentState.ASSIGNED, "selected")

    def assignment(self, assignment_id: str) -> AssignmentRecord:
        """One assignment. Raises UnknownAssignment."""
        query = self._held(round_rows.ASSIGNED_ROWS.where(ASSIGNMENTS.c.id == assignment_id), ASSIGNMENTS)
        assignment = self._one(round_rows.assignment_of, query)
        if assignment is None:
            raise UnknownAssignment("there is no such assignment; check in again")
        return assignment

    def assignments(self, ids: Collection[str]) -> dict[str, AssignmentRecord]:
        """The existing ones of these assignments by id, in a transaction that writes."""
        found = (
            one for some in slices(list(ids)) for one in self._all(round_rows.assignment_of, _GIVEN, {"ids": some})
        )
        return {one.id: one for one in found}

    def add_reports(self, digests: Mapping[str, tuple[int, str]]) -> None:
        """Count reports, all at once: by assignment, the row id of the round whose sum each is in, and its digest.

        Raises StoreConflict when one of the assignments waits for a report no more.
        """
        if not digests:
            return
        rows = [
            {"assignment": assignment, "round": round_id, "sha256": sha256, "received_at": self.at}
            for assignment, (round_id, sha256) in digests.items()
        ]
        self._connection.execute(insert(REPORTS), rows)
        if sum(self._connection.execute(_REPORT, {"ids": some}).rowcount for some in slices(list(digests))) != len(
            digests
        ):
            raise StoreConflict(_CONFLICT.format(ASSIGNMENTS.name, AssignmentState.ASSIGNED))
        before, after = AssignmentState.ASSIGNED, AssignmentState.REPORTED
        self._transitions("assignment", digests, before, after, "report accepted")

    def move_assignment(self, assignment: AssignmentRecord, to: AssignmentState, cause: str, reason: str = "") -> None:
        """Change an assignment's state. Raises StoreConflict when it is no longer the one in `assignment`."""
        values = {"state": move(assignment.state, to), "reason": reason}
        self._guarded(ASSIGNMENTS, assignment.id, assignment.state, values)
        self._transition("assignment", assignment.id, assignment.state, to, cause)

    def end_assignments(
        self, task_id: str, numbers: range, to: AssignmentState, cause: str, names: Collection[str] | None = None
    ) -> list[AssignedDevice]:
        """End the open assignments of a task's rounds of these numbers, or only those called `names`.

        Answers which ended.
        """
        open_ = self.cohorts.at_work(task_id, numbers)
        ended = [device for device in open_ if names is None or device.id in names]
        for some in slices([device.id for device in ended]):
            self._connection.execute(update(ASSIGNMENTS).where(ASSIGNMENTS.c.id.in_(some)).values(state=to))
        self._transitions("assignment", [device.id for device in ended], AssignmentState.ASSIGNED, to, cause)
        return ended

    def leave_out(self, reasons: Mapping[str, LeftOut]) -> dict[str, LeftOut]:
        """Leave devices out of further attempts at a round, by assignment, each for a reason; answers it by device."""
        for reason in LeftOut:
            for some in slices([assignment for assignment, why in reasons.items() if why is reason]):
                self._connection.execute(update(ASSIGNMENTS).where(ASSIGNMENTS.c.id.in_(some)).values(reason=reason))
        return {one.device: reasons[one.id] for one in self.assignments(reasons).values()}

    def left_out(self, task_id: str, number: int) -> frozenset[str]:
        """The devices that are left out of further attempts at round `number`."""
        where = (ROUNDS.c.task == task_id) & (ROUNDS.c.number == number) & ASSIGNMENTS.c.reason.in_(list(LeftOut))
        return frozenset(self._connection.scalars(select(ASSIGNMENTS.c.device).join(ROUNDS).where(where)))

    # --- the ways of writing

    def _insert_if_absent(self, table: Table, **values: Any) -> None:
        """Insert a row unless there is one with its key, even one that another transaction is writing now."""
        self._connection.execute(self._insert_unless(table).on_conflict_do_nothing(), values)

    def _insert(self, table: Table, **values: Any) -> Any:
        return (self._connection.execute(insert(table), values).inserted_primary_key or (None,))[0]

    def _guarded(self, table: Table, row_id: object, before: str, values: dict[str, Any]) -> None:
        if self._connection.execute(_guard(table), values | {"_id": row_id, "_before": before}).rowcount != 1:
            raise StoreConflict(_CONFLICT.format(table.name, before))

    def _transition(self, entity: str, entity_id: object, before: str, after: str, cause: str) -> None:
        self._transitions(entity, [entity_id], before, after, cause)

    def _transitions(self, entity: str, ids: Iterable[object], before: str, after: str, cause: str) -> None:
        shared = {"entity": entity, "from_state": before, "to_state": after, "cause": cause, "at": self.at}
        rows = [{"entity_id": str(entity_id)} | shared for entity_id in ids]
        if rows:
            self._connection.execute(insert(TRANSITIONS), rows)


def _values(round_: Round) -> dict[str, Any]:
    """The columns of a round that its value has."""
    return {name: getattr(round_, name) for name in ("state", "reason", *COUNTS)} | {"staleness": round_.staleness}


@cache
def _guard(table: Table) -> Update:
    return update(table).where((table.c.id == bindparam("_id")) & (table.c.state == bindparam("_before")))


def _agrees(row: Row[Any], in_memory: Round | None) -> bool:
    """Whether a round is as far in the store as in memory: no round returns to an earlier state or count."""
    return in_memory is not None and all(getattr(row, name) == getattr(in_memory, name) for name in ("state", *COUNTS))
