"""The base of all records: one transaction, and what SQLite and PostgreSQL do differently in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import Select, Table, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

T = TypeVar("T")
_MOST_NAMED = 1000
"""Ids in one statement."""


class WithinTransaction:
    """Rows of some tables within one transaction. at: its time, in seconds since 1970."""

    def __init__(self, connection: Connection, at: float, *, writing: bool) -> None:
        self._connection = connection
        self._writing = writing
        self._on_postgresql = connection.dialect.name == "postgresql"
        self.at = at

    def _lock_writers(self, table: Table) -> None:
        """Let other writers of `table` wait until this transaction ends; readers go on. SQLite has one writer anyway.

        For a decision that rests on which rows are absent. What was read before the lock may have changed since: lock
        first, then read, then decide.
        """
        if self._on_postgresql:
            self._connection.execute(text(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE"))

    def _held(self, query: Select[Any], table: Table) -> Select[Any]:
        """A query whose rows of `table` no other transaction changes until this one ends, if this one writes."""
        return query.with_for_update(of=table, key_share=True) if self._writing else query

    def _insert_unless(self, table: Table) -> postgresql.Insert | sqlite.Insert:
        """An insertion that can say what happens when there is a row with its key already."""
        return postgresql.insert(table) if self._on_postgresql else sqlite.insert(table)


def slices(named: Sequence[T]) -> Iterator[Sequence[T]]:
    """These, as many at a time as one statement may name."""
    yield from (named[start : start + _MOST_NAMED] for start in range(0, len(named), _MOST_NAMED))
