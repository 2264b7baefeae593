"""The database: connections and transactions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy.exc import OperationalError

from coordinator.errors import DatabaseLocked
from coordinator.store.database_engines import AT_ONCE_S, is_locked, open_engines
from coordinator.store.migrations import check_revision, make_tables
from coordinator.store.records import Records


class Database:
    """An SQLite file or a PostgreSQL database; `create` makes the file, and the tables where there are none.

    `reading` and `writing` give a transaction's typed rows. Raises MissingStore when it is not there,
    UnsupportedDatabase when it cannot be opened, WrongRevision when its tables are not those of this code.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time, *, create: bool = True) -> None:
        self._clock = clock
        self._engines = open_engines(url, create=create)
        self.engine = self._engines.reader
        with self._engines.opening():
            if create:
                make_tables(self._engines)
            with self.engine.begin() as connection:
                check_revision(connection, self._engines.name)

    @contextmanager
    def reading(self) -> Iterator[Records]:
        """One consistent view of the rows."""
        with self.engine.begin() as connection:
            yield Records(connection, self._clock(), writing=False)

    @contextmanager
    def writing(self) -> Iterator[Records]:
        """One transaction: everything is durable once the block is left, or nothing was done."""
        with self._engines.writer.begin() as connection:
            yield Records(connection, self._clock(), writing=True)

    @contextmanager
    def writing_at_once(self) -> Iterator[Records]:
        """As `writing`, but without waiting for another transaction. Raises DatabaseLocked when it would have to."""
        try:
            with (
                self._engines.writer.connect().execution_options(lock_wait_s=AT_ONCE_S) as connection,
                connection.begin(),
            ):
                yield Records(connection, self._clock(), writing=True)
        except OperationalError as error:
            if is_locked(error):
                raise DatabaseLocked("another transaction holds what this one would write") from error
            raise

    def close(self) -> None:
        """Close every connection."""
        self._engines.close()
