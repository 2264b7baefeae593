"""The state database of a device: one SQLite file that stays consistent after a kill or a power cut.

Its tables: `retry`, `spent`, `answer`, `model`, `model_counter` and `journal` (records.py), `assignment` and `kept`
(assignment.py) of this package; `enrolment` and `credential` (enrolment.py) and `answered` (secure.py) of `protocol`,
and of `permission` `released`, `lineage` and `log_head` (policy.py).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from device_runtime.conditions import Clock
from device_runtime.errors import StateDamaged, StateError

T = TypeVar("T")

NAME = "state.db"
# Written into the file's header, so that another application's database is not taken for ours.
APPLICATION_ID = 0x4D757353
# A database of another version is set aside, never migrated.
VERSION = 1
SCHEMA = f"""
BEGIN;
CREATE TABLE retry (
    coordinator TEXT, population TEXT, due TEXT CHECK (due IS NULL OR json_valid(due)), token TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (coordinator, population)
) WITHOUT ROWID;
CREATE TABLE assignment (
    coordinator TEXT, population TEXT, stored TEXT NOT NULL CHECK (json_valid(stored)),
    PRIMARY KEY (coordinator, population)
);
CREATE TABLE kept (
    coordinator TEXT, population TEXT, task TEXT, plan TEXT NOT NULL, current BLOB, pending BLOB,
    assignment TEXT NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL,
    until TEXT NOT NULL CHECK (json_valid(until)), PRIMARY KEY (coordinator, population, task)
) WITHOUT ROWID;
CREATE TABLE enrolment (coordinator TEXT PRIMARY KEY, enrolled TEXT NOT NULL CHECK (json_valid(enrolled)));
CREATE TABLE credential (authority TEXT PRIMARY KEY, kept TEXT NOT NULL CHECK (json_valid(kept)));
CREATE TABLE answered (
    coordinator TEXT, task TEXT, release TEXT, number INTEGER NOT NULL, PRIMARY KEY (coordinator, task, release)
);
CREATE TABLE released (signer TEXT, population TEXT, counter INTEGER NOT NULL, PRIMARY KEY (signer, population));
CREATE TABLE log_head (signer TEXT PRIMARY KEY, head TEXT NOT NULL CHECK (json_valid(head)));
CREATE TABLE lineage (release TEXT PRIMARY KEY, entry TEXT NOT NULL CHECK (json_valid(entry)));
CREATE TABLE model (
    population TEXT, name TEXT, stored TEXT NOT NULL CHECK (json_valid(stored)), PRIMARY KEY (population, name)
);
CREATE TABLE model_counter (
    signer TEXT, population TEXT, name TEXT, counter INTEGER NOT NULL, PRIMARY KEY (signer, population, name)
);
CREATE TABLE journal (id INTEGER PRIMARY KEY, entry TEXT NOT NULL CHECK (json_valid(entry)));
CREATE TABLE spent (
    id INTEGER PRIMARY KEY, until TEXT NOT NULL CHECK (json_valid(until)),
    seconds REAL NOT NULL, bytes INTEGER NOT NULL, sessions INTEGER NOT NULL
);
CREATE TABLE answer (id INTEGER PRIMARY KEY, until TEXT NOT NULL CHECK (json_valid(until)));
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


class StateDatabase:
    """An open state database. `notice` tells the device's owner that a damaged one was replaced.

    Every method raises StateError when the file cannot be used, StateDamaged when its content is wrong.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, notice: str = "") -> None:
        self.notice = notice
        self._path = path
        self._connection = connection

    def execute(self, sql: str, *values: Any) -> list[Any]:
        """The rows of one statement. Outside a transaction it is committed."""
        with _explained(self._path):
            return self._connection.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run all statements in the block, or none."""
        with _explained(self._path), transaction(self._connection):
            yield


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run all statements in the block, or none, on a connection that commits each by itself."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # After some errors SQLite has already rolled back.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def read_json(reader: msgspec.json.Decoder[T], text: str, what: str) -> T:
    """The value in a column of JSON. Raises StateDamaged, which names it."""
    try:
        return reader.decode(text)
    except msgspec.MsgspecError as error:
        raise StateDamaged(f"{what} cannot be read", str(error)) from error


@contextlib.contextmanager
def open_database(folder: Path, clock: Clock) -> Iterator[StateDatabase]:
    """The state database of a folder, made when missing. Only for the holder of the state folder.

    A damaged one is kept aside under a name with the time, a fresh one is started, and `notice` says so.
    """
    path = folder / NAME
    try:
        connection, notice = _connect(path), ""
    except StateDamaged as error:
        aside = _set_aside(path, clock)
        notice = f"{error.detail}; it is kept as {aside.name}, and a fresh one was started"
        connection = _connect(path)
    try:
        with contextlib.closing(connection):
            yield StateDatabase(path, connection, notice)
    except StateDamaged as error:
        aside = _set_aside(path, clock)
        raise StateDamaged(
            f"{error.detail}; it is kept as {aside.name}, the next session starts a fresh one"
        ) from error


@contextlib.contextmanager
def read_database(folder: Path) -> Iterator[StateDatabase]:
    """The state database of a folder, read-only, while a device may be using it."""
    path = folder / NAME
    if not path.is_file():
        raise StateError(f"{folder} holds no {NAME}: no device has run with this state folder")
    with (
        _explained(path),
        contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection,
    ):
        _demand_ours(connection)
        yield StateDatabase(path, connection)


def _connect(path: Path) -> sqlite3.Connection:
    try:
        path.touch(mode=0o600)
    except OSError as error:
        raise StateError("the state database cannot be made", f"{path}: {error}") from error
    with _explained(path), contextlib.ExitStack() as undo:
        connection = sqlite3.connect(path, isolation_level=None)
        undo.callback(connection.close)
        # Write only after checking that the file is ours or empty.
        if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            _demand_ours(connection)
        else:
            connection.executescript(SCHEMA)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        undo.pop_all()
        return connection


def _demand_ours(connection: sqlite3.Connection) -> None:
    header = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    if header != [APPLICATION_ID, VERSION]:
        raise StateDamaged(f"{NAME} is not a state database of version {VERSION}")
    if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
        raise StateDamaged(f"{NAME} is damaged")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        # The low byte is the error; the rest says more about it.
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE:
            raise StateDamaged(f"{NAME} is damaged", f"{path}: {error}") from error
        raise StateError("the state database cannot be used", f"{path}: {error}") from error


def _set_aside(path: Path, clock: Clock) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(clock.wall()))
    names = (f"{path.name}.damaged-{stamp}{more}" for more in ("", *(f"-{n}" for n in range(2, 100))))
    aside = next(candidate for candidate in map(path.with_name, names) if not candidate.exists())
    try:
        os.replace(path, aside)
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    except OSError as error:
        raise StateError("a damaged state database cannot be set aside", f"{path}: {error}") from error
    return aside
