"""The database: its revisions, connections and transactions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, TimeoutError

from coordinator.errors import DatabaseLocked, LeaseLost, StoreConflict, Unavailable, UnusableStore
from coordinator.failpoints import reach
from coordinator.store.database_engines import AT_ONCE_S, Engines, is_locked, one_line, open_engines
from coordinator.store.records.records import Records

# Migrations: the revision of a database's tables, and the way to another one. Alembic does the work.
#
# The revisions lie in the folder `revisions`. One that was released stays as it is; a change of `tables.py` then gets
# one of its own.

HEAD = "0001"
"""The revision that this code works with."""
BASE = "base"
"""The revision of a database without tables."""
UNKNOWN = "unknown"
"""The revision of tables that are not a coordinator's."""
SCRIPTS = "coordinator.store:revisions"
"""Where Alembic finds the revisions."""
_LOCK = 0x6D7573746572
"""Key of the advisory lock under which PostgreSQL's tables are made and changed."""


@dataclass(frozen=True, slots=True)
class Migration:
    """The revisions before and after `migrate`."""

    before: str
    after: str


def migrate(url: str, to: str = HEAD) -> Migration:
    """Bring an existing database to revision `to`, up or down, in one transaction. No coordinator may run on it.

    Going down loses the contents of the tables and columns that go; BASE has none. Raises UnusableStore, also when
    there is no such revision, or the database is at an unknown one.
    """
    engines = open_engines(url, create=False, bounded=False)  # a change of a large table takes its time
    with engines.opening(), _changing(engines) as connection:
        before = revision_of(connection)
        _run(connection, before, to, engines.name)
        after = revision_of(connection)
    engines.close()
    return Migration(before, after)


def make_tables(engines: Engines) -> None:
    """Make the tables in a database that has none, unless another process was first."""
    with _changing(engines) as connection:
        if revision_of(connection) == BASE:
            _run(connection, BASE, HEAD, engines.name)


def check_revision(connection: Connection, name: str) -> None:
    """Say what to do unless the database called `name` is at HEAD. Raises UnusableStore."""
    revision = revision_of(connection)
    if revision == BASE:
        raise UnusableStore(f"there are no tables in {name}; start the coordinator first, or name its database")
    if revision == UNKNOWN:
        raise UnusableStore(f"{name} holds tables, but not a coordinator's; name another database")
    if revision != HEAD:
        raise UnusableStore(
            f"{name} is at revision {revision}, and this version works with {HEAD}: stop every coordinator on it and "
            "run `muster coordinator migrate`, of the newer version if they differ"
        )


def revision_of(connection: Connection) -> str:
    """The revision of a database, BASE or UNKNOWN."""
    names = set(sqlalchemy.inspect(connection).get_table_names())
    if "alembic_version" in names:
        return connection.scalar(sqlalchemy.text("SELECT version_num FROM alembic_version")) or BASE
    return UNKNOWN if names else BASE


@contextmanager
def _changing(engines: Engines) -> Iterator[Connection]:
    """A transaction that changes tables; others wait for it."""
    with engines.writer.connect() as connection:
        connection.detach()  # it is closed at the end: other transactions must not get it as it is set here
        if connection.dialect.name == "sqlite":
            # A table that changes is made anew, and rows of others point at it while the old one goes. Within a
            # transaction SQLite would not switch this.
            connection.connection.cursor().execute("PRAGMA foreign_keys=OFF")
        with connection.begin():
            if connection.dialect.name == "postgresql":
                connection.execute(sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(_LOCK)))
            yield connection
            reach("migration.before-commit")
    reach("migration.after-commit")


def _run(connection: Connection, before: str, to: str, name: str) -> None:
    # Imported late: a database that needs no change should not pay for it.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", SCRIPTS)
    config.attributes["connection"] = connection
    revisions = [BASE, *reversed([script.revision for script in ScriptDirectory.from_config(config).walk_revisions()])]
    for revision, what in ((before, f"{name} is at revision {before}"), (to, f"there is no revision {to!r}")):
        if revision not in revisions:
            raise UnusableStore(f"{what}; this version knows {', '.join(revisions)}")
    (command.upgrade if revisions.index(to) >= revisions.index(before) else command.downgrade)(config, to)


_LOG = logging.getLogger(__name__)
_AWAY = "the database cannot be reached now, or refuses; come back later"
_DATABASE_FAILURES = (OperationalError, InterfaceError, TimeoutError)
"""A full disk, a lock, a connection that breaks: what a statement raises, before the transaction is left."""
STORE_FAILURES = (DatabaseLocked, LeaseLost, StoreConflict, Unavailable, OSError, MemoryError, *_DATABASE_FAILURES)
"""What keeps a transaction from being done now. It may be done later; any other error would come again."""


class Database:
    """An SQLite file or a PostgreSQL database; `create` makes the file, and the tables where there are none.

    `reading` and `writing` give a transaction's typed rows. Raises UnusableStore when it is not there or cannot be
    opened, or when its tables, or the settings of a task, are not those of this code.
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
