"""The database: connections and transactions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy.engine import Connection

from coordinator.errors import MissingStore, UnsupportedDatabase
from coordinator.store.records import Records
from coordinator.store.tables import METADATA

_SQLITE = "sqlite:///"


class Database:
    """A SQLite file, made if it is not there and `create`. `reading` and `writing` give a transaction's typed rows.

    Raises MissingStore when it is not there, UnsupportedDatabase when it cannot be opened or is of another version.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time, *, create: bool = True) -> None:
        if not url.startswith(_SQLITE) or url.removeprefix(_SQLITE) in ("", ":memory:"):
            raise UnsupportedDatabase(f"{url!r}: this version stores its state in a SQLite file, {_SQLITE}PATH")
        if not create and not Path(url.removeprefix(_SQLITE)).is_file():
            raise MissingStore(f"there is no database {url}; start the coordinator first, or name its database")
        self._clock = clock
        # An error that is logged must not carry a row: assignment ids are secrets.
        self.engine = sqlalchemy.create_engine(url, connect_args={"timeout": 10}, hide_parameters=True)
        sqlalchemy.event.listen(self.engine, "connect", _configure)
        sqlalchemy.event.listen(self.engine, "begin", _begin)
        self._writer = self.engine.execution_options(begin="BEGIN IMMEDIATE")
        try:
            with self._writer.begin() as connection:
                if create:
                    METADATA.create_all(connection)
                _check_tables(connection, url)
        except sqlalchemy.exc.DatabaseError as error:
            raise UnsupportedDatabase(f"{url!r} cannot be opened: {error.orig}") from error

    @contextmanager
    def reading(self) -> Iterator[Records]:
        """One consistent view of the rows."""
        with self.engine.begin() as connection:
            yield Records(connection, self._clock())

    @contextmanager
    def writing(self) -> Iterator[Records]:
        """One transaction: everything is durable once the block is left, or nothing was done."""
        with self._writer.begin() as connection:
            yield Records(connection, self._clock())

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()


def _check_tables(connection: Connection, url: str) -> None:
    inspector = sqlalchemy.inspect(connection)
    for table in METADATA.sorted_tables:
        known = inspector.get_columns(table.name) if inspector.has_table(table.name) else []
        missing = set(table.columns.keys()) - {column["name"] for column in known}
        if missing:
            raise UnsupportedDatabase(
                f"{url!r} is of another version: table {table.name} has no {sorted(missing)}; start with a new database"
            )


def _configure(connection: Any, _record: object) -> None:
    # SQLAlchemy emits BEGIN itself, below: the driver's own would be deferred, and two writers that both read first
    # would then fail instead of waiting for each other.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
