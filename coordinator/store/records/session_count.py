"""Rows of session counts, within one transaction. Their meaning: coordinator.session_counts."""

from __future__ import annotations

from sqlalchemy import Insert, select
from sqlalchemy.dialects import postgresql, sqlite

from coordinator.rules.entities import SessionShape, Task
from coordinator.session_counts import Counts
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import SESSION_SHAPES


def _adding(new: postgresql.Insert | sqlite.Insert) -> Insert:
    more = {"count": SESSION_SHAPES.c["count"] + new.excluded["count"]}
    return new.on_conflict_do_update(index_elements=list(SESSION_SHAPES.primary_key), set_=more)


# Made once, and so compiled once: to build a statement anew costs more than to execute it.
_ADD = {"postgresql": _adding(postgresql.insert(SESSION_SHAPES)), "sqlite": _adding(sqlite.insert(SESSION_SHAPES))}


class SessionCountRecords(WithinTransaction):
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
        return [SessionShape(row.task, row.shape, row[3]) for row in self._connection.execute(query)]

    def of(self, task: Task) -> list[SessionShape]:
        """The counts of a task, and those of its population without a task; most frequent first."""
        mine = (SESSION_SHAPES.c.population == task.settings.population) & SESSION_SHAPES.c.task.in_(("", task.id))
        query = select(SESSION_SHAPES).where(mine).order_by(SESSION_SHAPES.c["count"].desc(), SESSION_SHAPES.c.shape)
        return [SessionShape(row.task, row.shape, row[3]) for row in self._connection.execute(query)]
