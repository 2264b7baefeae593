"""The database: connections and transactions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, TimeoutError

from coordinator.errors import DatabaseLocked, LeaseLost, StoreConflict, Unavailable
from coordinator.store.database_engines import AT_ONCE_S, is_locked, one_line, open_engines
from coordinator.store.migrations import check_revision, make_tables
from coordinator.store.records.records import Records

_LOG = logging.getLogger(__name__)
_AWAY = "the database cannot be reached now, or refuses; come back later"
_DATABASE_FAILURES = (OperationalError, InterfaceError, TimeoutError)
"""A full disk, a lock, a connection that breaks: what a statement raises, before the transaction is left."""
STORE_FAILURES = (DatabaseLocked, LeaseLost, StoreConflict, Unavailable, OSError, MemoryError, *_DATABASE_FAILURES)
"""What keeps a transaction from being done now. It may be done later; any other error would come again."""


class Database:
    """An SQLite file or a PostgreSQL database; `create` makes the file, and the tables where there are none.

    `reading` and `writing` give a transaction's typed rows. Raises MissingStore when it is not there,
    UnsupportedDatabase when it cannot be opened, WrongRevision when its tables are not those of this code,
    UnreadableTask when a task has settings that are not.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time, *, create: bool = True) -> None:
        self._clock = clock
        self._engines = open_engines(url, create=create)
        self._reach = _Reach()
        self.engine = self._engines.reader
        with self._engines.opening():
            if create:
                make_tables(self._engines)
            with self.engine.begin() as connection:
                check_revision(connection, self._engines.name)
                Records(connection, clock(), writing=False).tasks()  # a newer version's is refused before any work

    @contextmanager
    def reading(self) -> Iterator[Records]:
        """One consistent view of the rows. Raises Unavailable while the database cannot be read; the log says why."""
        with self._reach.transaction(self.engine) as connection:
            yield Records(connection, self._clock(), writing=False)

    @contextmanager
    def writing(self) -> Iterator[Records]:
        """One transaction: everything is durable once the block is left, or nothing was done.

        Raises Unavailable; then it may have been done all the same, if the connection broke at its end.
        """
        with self._reach.transaction(self._engines.writer) as connection:
            yield Records(connection, self._clock(), writing=True)

    @contextmanager
    def writing_at_once(self) -> Iterator[Records]:
        """As `writing`, but without waiting for another transaction. Raises DatabaseLocked when it would have to."""
        with self._reach.transaction(self._engines.writer, lock_wait_s=AT_ONCE_S) as connection:
            yield Records(connection, self._clock(), writing=True)

    def close(self) -> None:
        """Close every connection."""
        self._engines.close()


class _Reach:
    """The way to a database, which may be lost. While it is, one transaction at a time tries it.

    All others are refused at once: each would hold a thread for as long as it takes to give the database up.
    """

    def __init__(self) -> None:
        self._lost = False
        self._trial = threading.Lock()

    @contextmanager
    def transaction(self, engine: Engine, **options: Any) -> Iterator[Connection]:
        """A transaction of an engine. Raises Unavailable instead of its errors; DatabaseLocked, IntegrityError."""
        trial = self._lost
        if trial and not self._trial.acquire(blocking=False):
            raise Unavailable(_AWAY)
        connected = False
        try:
            with engine.connect().execution_options(**options) as connection:
                connected = True
                with connection.begin():
                    yield connection
            self._found()
        except IntegrityError:
            raise
        except (DBAPIError, TimeoutError) as error:
            if options and isinstance(error, OperationalError) and is_locked(error):
                raise DatabaseLocked("another transaction holds what this one would write") from error
            lost = not connected or (isinstance(error, DBAPIError) and error.connection_invalidated)
            self._failed(one_line(getattr(error, "orig", error)), lost=lost)
            raise Unavailable(_AWAY) from error
        finally:
            if trial:
                self._trial.release()

    def _found(self) -> None:
        if self._lost:
            self._lost = False
            _LOG.warning("the database can be reached again")

    def _failed(self, words: str, *, lost: bool) -> None:
        if not self._lost:
            self._lost = lost
            _LOG.error("the database %s: %s", "cannot be reached" if lost else "failed", words)
