"""The database: how each kind is opened and made durable, its revisions, connections and transactions."""

from __future__ import annotations

import copy
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlalchemy.engine import URL, Connection, Engine, ExceptionContext
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, TimeoutError

from coordinator.errors import DatabaseLocked, LeaseLost, StoreConflict, Unavailable, UnusableStore
from coordinator.failpoints import reach
from coordinator.store.records.records import Records
from fedcore.private_files import new_private

if TYPE_CHECKING:
    from coordinator.store.bounded_connection import BoundedConnection


# Engines: how each kind of database is opened, made durable, and begins its transactions.
#
# | | SQLite | PostgreSQL |
# |---|---|---|
# | read | one snapshot | REPEATABLE READ, READ ONLY: one snapshot |
# | write | BEGIN IMMEDIATE: one writer at a time | READ COMMITTED; rows that a decision rests on are locked |
# | commit | WAL, synchronous=FULL | as the server's synchronous_commit says |
# | a server that is silent | – | given up, by TCP's own limits and by REPLY_S |
# | a server that may not write | – | not connected to, and left as soon as it says so |
# | behind a pooler | – | nothing is kept in a session: limits are set in each transaction |


_FORMS = "sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE"
_WAIT_S = 10
"""How long a transaction waits for another one's lock."""
CONNECT_S, POOL_S, REPLY_S = 5, 5.0, 15.0
"""How long a server may take to be connected to, and to answer a statement, locks included, and how long a transaction
waits for a connection that is free. All of it ends before a device gives up."""
_TCP = {
    "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 1000 * _WAIT_S,
}  # fmt: skip
"""The limits of a connection in the kernel, as libpq knows them: a peer that is gone is found within some 11 s."""
TIMES = ("connect_timeout", "keepalives", "tcp_user_timeout")
"""The parameters of an address that switch such limits off, with the value 0."""
AT_ONCE_S = 0.05
"""How long a transaction waits for a lock that is to be written at once or not at all."""
_LOCK_NOT_AVAILABLE = "55P03"
"""PostgreSQL's code of a lock that did not come free in time."""
_MAY_NOT_WRITE = ("25006", "0A000", "55000")
"""PostgreSQL's codes of a server that may not write: a statement is read-only; BEGIN READ WRITE, and _NOT_ON_A_STANDBY,
of a server in recovery."""
_NOT_ON_A_STANDBY = "pg_current_wal_lsn()"
"""What costs a primary nothing, and fails on a standby, in a transaction that only reads too."""


@dataclass(frozen=True, slots=True)
class Engines:
    """One pool of connections, with the two ways of beginning a transaction on it. `name` may be printed."""

    name: str
    reader: Engine
    writer: Engine

    def close(self) -> None:
        """Close every connection."""
        self.reader.dispose()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Close everything when the block fails. Raises UnusableStore instead of a driver's error."""
        try:
            yield
        except sqlalchemy.exc.DBAPIError as error:
            self.close()
            raise UnusableStore(f"{self.name!r} cannot be opened: {one_line(error.orig)}") from error
        except BaseException:
            self.close()
            raise


def is_locked(error: sqlalchemy.exc.OperationalError) -> bool:
    """Whether a transaction failed, and was undone, because it waited too long for another one's lock."""
    if isinstance(error.orig, sqlite3.Error):
        return error.orig.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # above are kinds of it
    return getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE


def sqlite_path(url: str) -> Path | None:
    """The file of an SQLite database; None for a database that is a server. Raises UnusableStore."""
    parsed = _parsed(url)
    return Path(parsed.database or "") if parsed.drivername == "sqlite" else None


def printable(url: str) -> str:
    """An address without the parts that may hold a password; *** when it is not an address."""
    try:
        return _shown(sqlalchemy.make_url(url))
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return "***"


def open_engines(url: str, *, create: bool, bounded: bool = True) -> Engines:
    """Engines of the database at `url`; nothing is connected yet. Raises UnusableStore.

    bounded: whether a server that takes REPLY_S for an answer is given up.
    """
    parsed = _parsed(url)
    if parsed.drivername == "postgresql":
        return _postgresql(parsed, REPLY_S if bounded else None)
    path = Path(parsed.database or "")
    if not create and not path.is_file():
        raise UnusableStore(f"there is no database {_shown(parsed)}; start the coordinator first, or name its database")
    if create:
        # SQLite gives its other files the mode of this one. Where it cannot be made, SQLite says so.
        with suppress(OSError), new_private(path):
            pass
    return _sqlite(parsed)


def _sqlite(url: URL) -> Engines:
    # An error that is logged must not carry a row, since assignment ids are secrets. Both engines hide parameters.
    engine = sqlalchemy.create_engine(url, connect_args={"timeout": _WAIT_S}, hide_parameters=True)
    sqlalchemy.event.listen(engine, "connect", _configure)
    sqlalchemy.event.listen(engine, "begin", _begin)
    return Engines(_shown(url), engine, engine.execution_options(begin="BEGIN IMMEDIATE"))


def _configure(connection: sqlite3.Connection, _record: object) -> None:
    # SQLAlchemy emits BEGIN itself, below: the driver's own would be deferred, and two writers that both read first
    # would then fail instead of waiting for each other.
    connection.isolation_level = None
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    _use_wal(connection)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch a file to the write-ahead log, for good. SQLite does not wait by itself for others that do so too."""
    deadline = time.monotonic() + _WAIT_S
    while connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    wait_s = options.get("lock_wait_s", _WAIT_S)
    if connection.info.get("lock_wait_s") != wait_s:
        connection.exec_driver_sql(f"PRAGMA busy_timeout={1000 * wait_s:.0f}")
        connection.info["lock_wait_s"] = wait_s
    connection.exec_driver_sql(options.get("begin", "BEGIN"))


def _begin_on_server(connection: Connection) -> None:
    driver: BoundedConnection = connection.connection.dbapi_connection  # type: ignore[assignment]
    wait_s = connection.get_execution_options().get("lock_wait_s")
    values = list(driver.first_in_transactions)
    if wait_s is not None:
        values.append(_setting("lock_timeout", f"{1000 * wait_s:.0f}ms", of_transaction=True))
    if values:
        connection.exec_driver_sql(f"SELECT {', '.join(values)}")


def _setting(name: str, value: str, *, of_transaction: bool) -> str:
    return f"set_config('{name}', '{value}', {of_transaction})"


def _set_limits(connection: BoundedConnection, limits: Mapping[str, str], *, writes: bool) -> None:
    """Set parameters of the server for the session, or for each transaction behind a pooler, which lends sessions."""
    pooled = not connection.has_session()
    settings = [_setting(name, value, of_transaction=pooled) for name, value in limits.items()]
    if pooled:
        connection.prepare_threshold = None
        connection.first_in_transactions = [*settings, _NOT_ON_A_STANDBY] if writes else settings
    else:
        connection.execute(f"SELECT {', '.join(settings)}")


def _leave(context: ExceptionContext) -> None:
    """Close the connections to a server that ended a session, or may not write, instead of using them again."""
    diagnosis = getattr(context.original_exception, "diag", None)
    if diagnosis is not None and (
        diagnosis.severity_nonlocalized == "FATAL"
        or diagnosis.sqlstate in _MAY_NOT_WRITE
        or str(diagnosis.sqlstate).startswith("57P")  # the server stops, crashed, or starts
    ):
        context.is_disconnect = True


def _postgresql(url: URL, reply_s: float | None) -> Engines:
    from coordinator.store.bounded_connection import BoundedConnection  # it loads PostgreSQL's library

    options = " ".join(url.normalized_query.get("options", ()))
    # The last one frees the locks of a process that was paused, or disappeared, inside a transaction, so that another
    # replica can take its populations. Those that the address names are its own.
    ours = {"lock_timeout": f"{_WAIT_S}s", "timezone": "UTC", "idle_in_transaction_session_timeout": f"{_WAIT_S}s"}
    limits = {name: value for name, value in ours.items() if name not in options.replace("-", "_").lower()}

    def connect(_dialect: object, _record: object, arguments: list[Any], named: dict[str, Any]) -> BoundedConnection:
        connection = BoundedConnection.connect(*arguments, **named, autocommit=True)
        connection.reply_s = reply_s
        try:
            _set_limits(connection, limits, writes=named["target_session_attrs"] != "any")
        except BaseException:
            connection.close()
            raise
        connection.autocommit = False
        return connection

    network = {"connect_timeout": CONNECT_S, "target_session_attrs": "read-write"} | _TCP
    engine = sqlalchemy.create_engine(
        url.set(drivername="postgresql+psycopg"),
        connect_args={name: value for name, value in network.items() if name not in url.query} | {"options": options},
        hide_parameters=True,
        pool_pre_ping=True,  # a server that was restarted costs no transaction
        pool_timeout=POOL_S,
    )
    sqlalchemy.event.listen(engine, "do_connect", connect)
    sqlalchemy.event.listen(engine, "handle_error", _leave)
    sqlalchemy.event.listen(engine, "begin", _begin_on_server)
    reader = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    return Engines(_shown(url), reader, engine.execution_options(isolation_level="READ COMMITTED"))


def _parsed(url: str) -> URL:
    """The parsed address of a database. Raises UnusableStore, without repeating what may hold a password."""
    try:
        parsed = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):  # the latter for a port that is no number
        raise UnusableStore(f"a database is given as {_FORMS}; this is not such an address") from None
    named = parsed.database not in (None, "", ":memory:")
    if parsed.drivername not in ("sqlite", "postgresql") or not named:
        raise UnusableStore(f"{_shown(parsed)!r}: a database is given as {_FORMS}")
    return parsed


def _shown(url: URL) -> str:
    """An address that may be printed: without the password, nor options, where one might stand too."""
    return url.set(query={}).render_as_string(hide_password=True)


def one_line(error: BaseException | None) -> str:
    """The words of a driver's error."""
    return " ".join(str(error).split())


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

    only: the populations to which what it shows is limited; None for every one.
    """

    only: frozenset[str] | None = None

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

    def limited(self, only: Collection[str] | None) -> Database:
        """The same database for somebody who may see these populations, or every one; it is not to be closed."""
        same = copy.copy(self)
        same.only = None if only is None else frozenset(only)
        return same

    @contextmanager
    def reading(self) -> Iterator[Records]:
        """One consistent view of the rows. Raises Unavailable while the database cannot be read; the log says why."""
        with self._reach.transaction(self.engine) as connection:
            yield Records(connection, self._clock(), writing=False, only=self.only)

    @contextmanager
    def writing(self) -> Iterator[Records]:
        """One transaction: everything is durable once the block is left, or nothing was done.

        Raises Unavailable; then it may have been done all the same, if the connection broke at its end.
        """
        with self._reach.transaction(self._engines.writer) as connection:
            yield Records(connection, self._clock(), writing=True, only=self.only)

    @contextmanager
    def writing_at_once(self) -> Iterator[Records]:
        """As `writing`, but without waiting for another transaction. Raises DatabaseLocked when it would have to."""
        with self._reach.transaction(self._engines.writer, lock_wait_s=AT_ONCE_S) as connection:
            yield Records(connection, self._clock(), writing=True, only=self.only)

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
