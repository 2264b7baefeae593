"""The SQLite file of an example store: made, opened, and put aside when it is damaged."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from device_runtime.errors import StoreDamaged, StoreError
from device_runtime.examples.source import invalid
from device_runtime.state.database import DAMAGE, transaction

log = logging.getLogger(__name__)

# Written into the file's header, so that another application's database is not taken for a store.
APPLICATION_ID = 0x4D757374
VERSION = 4
SCHEMA = f"""
CREATE TABLE collections (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    declaration BLOB NOT NULL -- JSON: name, fields, retention
);
CREATE TABLE examples (
    id INTEGER PRIMARY KEY,
    collection INTEGER NOT NULL REFERENCES collections (id),
    at REAL NOT NULL, -- seconds since 1970
    -- sealed: the fields in declared order, little-endian and row-major, but lines of uint8, which come last:
    -- each after its length in 4 bytes, and without the zeros at its end
    data BLOB NOT NULL
);
CREATE INDEX examples_by_age ON examples (collection, at, id);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""
CAUSES = {
    sqlite3.SQLITE_FULL: "there is no space left: free some, or let collections keep less",
    sqlite3.SQLITE_IOERR: "the disk cannot be written or read: it may be full or failing",
    sqlite3.SQLITE_READONLY: "the file or its folder may not be written",
    sqlite3.SQLITE_CANTOPEN: "the file is missing, or its folder may not be read or written",
    sqlite3.SQLITE_BUSY: "another process keeps it locked",
}
WAIT_S = 10.0


class ExampleDatabase:
    """One file. Each use opens its own connection, so several processes may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Make the file, readable only by its owner, if it is missing. Raises as `reading`."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
        except OSError as error:
            raise StoreError("the example store cannot be made", f"{self.path}: {error}") from error
        with self._connection() as connection:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            with transaction(connection):
                # Another process may have been faster.
                if not connection.execute("PRAGMA schema_version").fetchone()[0]:
                    for statement in SCHEMA.split(";"):
                        connection.execute(statement)
            self._check_ours(connection)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for reading.

        Raises ExamplesError when the file is no example store; StoreDamaged when it was one, after it was put aside and
        a new one was made; StoreError for any other refusal of SQLite.
        """
        with self._connection() as connection:
            self._check_ours(connection)
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A connection in a transaction, which an error rolls back. Raises as `reading`."""
        with self.reading() as connection, transaction(connection):
            yield connection

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        opened: int | None = None
        try:
            with contextlib.closing(
                sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=rw", WAIT_S, isolation_level=None, uri=True)
            ) as connection:
                opened = self._inode()
                # What the owner deletes is overwritten, not just forgotten.
                connection.execute("PRAGMA secure_delete = ON")
                yield connection
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in DAMAGE:
                raise self._put_aside(opened) from error
            cause = CAUSES.get(code, "SQLite refused")
            raise StoreError(f"the example store failed: {cause}", f"{self.path}: {error}") from error

    def _check_ours(self, connection: sqlite3.Connection) -> None:
        header = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        if header != [APPLICATION_ID, VERSION]:
            raise invalid(f"the examples are in SQLite, but not an example store of version {VERSION}", str(self.path))

    def _inode(self) -> int | None:
        with contextlib.suppress(OSError):
            return self.path.stat().st_ino
        return None

    def _put_aside(self, opened: int | None) -> StoreDamaged:
        """Keep the damaged file under another name, and start a new one with the same collections, without examples."""
        aside = self.path.with_name(f"{self.path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
        # Another process may have found the damage too, and replaced the file already.
        if opened == self._inode():
            declared = self._declarations()
            try:
                self.path.rename(aside)
                # A journal left behind would be played into the new file.
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{self.path}-journal").rename(f"{aside}-journal")
            except OSError as error:
                raise StoreError("the example store is damaged and cannot be put aside", f"{aside}: {error}") from error
            log.warning("the example store %s was damaged: it is kept as %s, and a new one was made", self.path, aside)
            self.create()
            # If the owner gave a group access, applications in that group need it again.
            self.path.chmod(aside.stat().st_mode & 0o777)
            with self.writing() as connection:
                connection.executemany("INSERT OR IGNORE INTO collections (name, declaration) VALUES (?, ?)", declared)
        return StoreDamaged(max(self.path.parent.glob(f"{self.path.name}.damaged-*Z"), default=aside))

    def _declarations(self) -> list[tuple[str, bytes]]:
        """The declared collections, as far as the damaged file is readable."""
        try:
            with contextlib.closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as old:
                return old.execute("SELECT name, declaration FROM collections").fetchall()
        except sqlite3.Error:
            return []
