"""Queries over attempts, within one transaction: those that came to nothing, and checkpoints of the others."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from sqlalchemy import ColumnElement, Select, func, select, union

from coordinator.rules.entities import Task
from coordinator.rules.rounds import FAILURES
from coordinator.rules.states import RoundState, TaskState
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.rows import task_of
from coordinator.store.tables import REPORTS, ROUNDS, TASKS, TRANSITIONS


class AttemptRecords(WithinTransaction):
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
            tasks = [task_of(row) for row in self._connection.execute(select(TASKS).where(there & (trained | named)))]
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
