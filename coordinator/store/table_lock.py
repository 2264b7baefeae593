"""A lock against other writers of a table, for a decision that rests on which rows are not there."""

from __future__ import annotations

from sqlalchemy import Table, text
from sqlalchemy.engine import Connection


def lock_writers(connection: Connection, table: Table) -> None:
    """Let other writers of `table` wait until this transaction ends; readers go on. On SQLite it is so anyway.

    What is read before the lock may have changed since: lock first, then read, then decide.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE"))
