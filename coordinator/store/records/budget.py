"""Rows of privacy budgets, and what the tasks of a population count as, within one transaction."""

from __future__ import annotations

from sqlalchemy import case, delete, func, select

from coordinator.rules.budget import Counted, PopulationBudget
from coordinator.rules.states import RoundState
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.rows import task_of
from coordinator.store.tables import BUDGETS, LEDGER, ROUNDS, TASKS

_ENDED = [state for state in RoundState if state.ended]


_VALUES = ("epsilon", "delta", "minimum_devices")


class BudgetRecords(WithinTransaction):
    """The operations on budgets, and the query for what they bound."""

    def hold(self) -> None:
        """Let others who add tasks, or change budgets, wait until the transaction ends: no two may see the same room.

        Lock first, then read: what was read before may have changed.
        """
        self._lock_writers(BUDGETS)

    def of(self, population: str) -> PopulationBudget | None:
        """The budget of a population; None without one."""
        row = self._connection.execute(select(BUDGETS).where(BUDGETS.c.population == population)).one_or_none()
        return None if row is None else PopulationBudget(**{name: getattr(row, name) for name in _VALUES})

    def set(self, population: str, budget: PopulationBudget | None) -> None:
        """Set the budget of a population, or remove it."""
        if budget is None:
            self._connection.execute(delete(BUDGETS).where(BUDGETS.c.population == population))
            return
        values = {name: getattr(budget, name) for name in _VALUES}
        add = self._insert_unless(BUDGETS).on_conflict_do_update(index_elements=[BUDGETS.c.population], set_=values)
        self._connection.execute(add, {"population": population, **values})

    def counted(self, population: str) -> list[Counted]:
        """Every task of a population with what counts of it, oldest first."""
        of_population = TASKS.c.population == population
        # Tasks first: a round that ends meanwhile is then counted twice at worst, as one to come and as one that left.
        query = select(TASKS).where(of_population).order_by(TASKS.c.created_at, TASKS.c.id)
        tasks = [task_of(row) for row in self._connection.execute(query)]
        committed = func.max(case((ROUNDS.c.state == RoundState.COMMITTED, ROUNDS.c.number), else_=0))
        live = func.max(case((ROUNDS.c.state.in_(_ENDED), 0), else_=1))
        query = select(ROUNDS.c.task, committed, live).join(TASKS).where(of_population).group_by(ROUNDS.c.task)
        rounds = {task: (number, bool(runs)) for task, number, runs in self._connection.execute(query)}
        query = (
            select(LEDGER.c.task, func.count().label("rows")).join(TASKS).where(of_population).group_by(LEDGER.c.task)
        )
        rows: dict[str, int] = {row.task: row.rows for row in self._connection.execute(query)}
        return [Counted(task, *rounds.get(task.id, (0, False)), rows.get(task.id, 0)) for task in tasks]
