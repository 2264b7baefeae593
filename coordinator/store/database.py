"""The database: connections and transactions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy
from sqlalchemy.engine import Connection

from coordinator.errors import UnsupportedDatabase
from coordinator.store.records import Records
from coordinator.store.tables import METADATA

_SQLITE = "sqlite:///"


class Database:
    """A SQLite file. `reading` and `writing` give a transaction's typed rows."""

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        if not url.startswith(_SQLITE) or url.removeprefix(_SQLITE) in ("", ":memory:"):
            raise UnsupportedDatabase(f"{url!r}: this version stores its state in a SQLite file, {_SQLITE}PATH")
        self._clock = clock
        # An error that is logged must not carry a row: assignment ids are secrets.
        self.engine = sqlalchemy.create_engine(url, connect_args={"timeout": 10}, hide_parameters=True)
        sqlalchemy.event.listen(self.engine, "connect", _configure)
        sqlalchemy.event.listen(self.engine, "begin", _begin)
        self._writer = self.engine.execution_options(begin="BEGIN IMMEDIATE")
        try:
            with self._writer.begin() as connection:
                METADATA.create_all(connection)
        except sqlalchemy.exc.OperationalError as error:
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


def _configure(connection: Any, _record: object) -> None:
    # SQLAlchemy emits BEGIN itself, below: the driver's own would be deferred, and two writers that both read first
    # would then fail instead of waiting for each other.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
