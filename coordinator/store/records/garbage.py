"""Rows that garbage collection reads and deletes, within one transaction. The rule: garbage_collection.py."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import delete, exists, func, or_, select, update

from coordinator.rules.states import AssignmentState, RoundState
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import ASSIGNMENTS, BLOBS, METADATA, REPORTS, ROUNDS, TRANSITIONS


class GarbageRecords(WithinTransaction):
    """The operations on these rows."""

    def known_blobs(self, names: Collection[str]) -> set[str]:
        """Those of `names` that are blobs with a row; until the transaction ends no other one adds or removes any."""
        self._lock_writers(BLOBS)
        return set(self._connection.scalars(select(BLOBS.c.sha256).where(BLOBS.c.sha256.in_(names))))

    def rounds_with_models(self, task_id: str) -> list[int]:
        """The committed rounds whose models are kept."""
        kept = (ROUNDS.c.task == task_id) & ROUNDS.c.checkpoint_sha256.is_not(None)
        return list(self._connection.scalars(select(ROUNDS.c.number).where(kept)))

    def models_in_use(self, task_id: str) -> set[int]:
        """The rounds from whose models open assignments start; 0 is the start."""
        open_ = (ROUNDS.c.task == task_id) & (ASSIGNMENTS.c.state == AssignmentState.ASSIGNED)
        drawn = select(ROUNDS.c.number).join(ASSIGNMENTS).where(open_).distinct()
        return {number - 1 for number in self._connection.scalars(drawn)}

    def forget_models(self, task_id: str, numbers: Collection[int]) -> None:
        """Remove the models of committed rounds; note the time at blobs that no row points at any more."""
        self._lock_writers(BLOBS)
        of_rounds = (ROUNDS.c.task == task_id) & ROUNDS.c.number.in_(numbers) & ROUNDS.c.checkpoint_sha256.is_not(None)
        models = self._connection.execute(select(ROUNDS.c.state_sha256, ROUNDS.c.checkpoint_sha256).where(of_rounds))
        let_go = {digest for row in models for digest in row}
        self._connection.execute(update(ROUNDS).where(of_rounds).values(state_sha256=None, checkpoint_sha256=None))
        pointers = [key.parent for table in METADATA.tables.values() for key in table.foreign_keys]
        pointers = [column for column in pointers if column.references(BLOBS.c.sha256)]
        needed = [BLOBS.c.sha256.in_(select(column).where(column.is_not(None))) for column in pointers]
        gone = BLOBS.c.sha256.in_(let_go) & ~or_(*needed)
        self._connection.execute(update(BLOBS).where(gone).values(unneeded_at=self.at))

    def forget_blobs(self, age_s: float) -> int:
        """Remove the rows of blobs at which nothing has pointed for that long; answers how many."""
        self._lock_writers(BLOBS)
        return self._connection.execute(delete(BLOBS).where(BLOBS.c.unneeded_at < self.at - age_s)).rowcount

    def rounds_with_cohorts(self, task_id: str, age_s: float, within: int) -> list[int]:
        """Row ids of rounds that ended over `age_s` ago, whose assignments are still there.

        The last `within` committed rounds of the task, and all later ones, are not among them. Nor are those with an
        assignment that is open.
        """
        of_task = ROUNDS.c.task == task_id
        committed = select(func.max(ROUNDS.c.number)).where(of_task & (ROUNDS.c.state == RoundState.COMMITTED))
        last = self._connection.scalar(committed) or 0
        old = of_task & (ROUNDS.c.ended_at < self.at - age_s) & (ROUNDS.c.number <= last - within)
        here = ASSIGNMENTS.c.round == ROUNDS.c.id
        over = exists().where(here) & ~exists().where(here & (ASSIGNMENTS.c.state == AssignmentState.ASSIGNED))
        return list(self._connection.scalars(select(ROUNDS.c.id).where(old & over).order_by(ROUNDS.c.id)))

    def forget_cohort(self, round_id: int) -> int:
        """Remove a round's assignments with their reports and transitions; answers how many assignments."""
        ids = select(ASSIGNMENTS.c.id).where(ASSIGNMENTS.c.round == round_id)
        of_them = (TRANSITIONS.c.entity == "assignment") & TRANSITIONS.c.entity_id.in_(ids)
        self._connection.execute(delete(TRANSITIONS).where(of_them))
        self._connection.execute(delete(REPORTS).where(REPORTS.c.assignment.in_(ids)))
        return self._connection.execute(delete(ASSIGNMENTS).where(ASSIGNMENTS.c.round == round_id)).rowcount
