"""The SQLite file of an example store, and the collections of examples in it."""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from device_runtime.errors import ExampleRefused, StoreDamaged, StoreError
from device_runtime.examples.source import Columns, invalid, padded
from device_runtime.state.database import DAMAGE, transaction
from fedcore.plan import Field
from fedcore.validation import converter

Example = Mapping[str, ArrayLike]
"""One value per field: a number, nested lists of numbers, an array, or the text of a uint8 field (bytes); without a
batch axis."""

_LENGTH = struct.Struct("<I")
INTEGERS = frozenset({"int64", "int32", "uint8"})
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a collection. When one is exceeded, the oldest examples are removed. By default all are kept."""

    max_age_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    max_count: AtLeastOne | None = None
    max_bytes: AtLeastOne | None = None


class Collection(msgspec.Struct, frozen=True):
    """A declared collection. `fields` are those that plans name; every example has exactly these."""

    name: str
    fields: tuple[Field, ...]
    retention: Retention = Retention()

    def checked(self) -> Collection:
        """This declaration. Raises ExampleRefused when no plan could use such examples, or retention keeps none."""
        try:
            collection = _collection(msgspec.to_builtins(self))
        except msgspec.ValidationError as error:
            raise ExampleRefused(f"collection {self.name!r} cannot be declared: {error}") from error
        if not math.isfinite(collection.retention.max_age_s or 0.0):
            raise ExampleRefused(f"collection {self.name!r}: max_age_s must be finite; without one there is no limit")
        names = [field.name for field in collection.fields]
        if not collection.name or not names or not all(names) or len(set(names)) < len(names):
            raise ExampleRefused(
                f"collection {self.name!r} needs a name and fields with names of their own, not {names}"
            )
        for field in collection.fields:
            highest = np.iinfo(field.dtype).max + 1 if field.dtype in INTEGERS else 0
            if field.high is not None and not 1 <= field.high <= highest:
                raise ExampleRefused(f"field {field.name!r} of {field.dtype} cannot have {field.high} as its high")
        if collection.most == 0:
            raise ExampleRefused(
                f"retention of collection {self.name!r} is below the {collection.example_bytes} bytes of one example"
            )
        return collection

    @property
    def example_bytes(self) -> int:
        """The size of one example, with texts as long as they may be."""
        return _record(self.fields).itemsize

    @property
    def most(self) -> int | None:
        """The most examples that retention by count and by bytes allows."""
        counts = [self.retention.max_count] if self.retention.max_count is not None else []
        if self.retention.max_bytes is not None:
            counts.append(self.retention.max_bytes // max(self.example_bytes, 1))
        return min(counts, default=None)

    def encode(self, example: Example) -> bytes:
        """The bytes of one example. Raises ExampleRefused, naming the field that no plan could train on."""
        names = [field.name for field in self.fields]
        if set(example) != set(names):
            raise ExampleRefused(
                f"an example of collection {self.name!r} has the fields {sorted(names)}, not {sorted(example)}"
            )
        values = {field.name: _array(field, example[field.name]).tobytes() for field in self.fields}
        fixed = b"".join(values[field.name] for field in self.fields if not _is_line(field))
        lines = [values[field.name].rstrip(b"\0") for field in self.fields if _is_line(field)]
        return fixed + b"".join(_LENGTH.pack(len(line)) + line for line in lines)

    def decode(self, examples: Iterable[bytes], texts: Container[str]) -> Columns:
        """The fields (n, …) of encoded examples. Those in `texts` are bytes (n,), each as long as it is.

        Raises ValueError for bytes that are no example.
        """
        record = _record([field for field in self.fields if not _is_line(field)])
        lines: dict[str, list[bytes]] = {field.name: [] for field in self.fields if _is_line(field)}
        fixed = bytearray()
        for index, example in enumerate(examples):
            fixed += example[: record.itemsize]
            place = record.itemsize
            for of_field in lines.values():
                begin = place + _LENGTH.size
                place = begin + int.from_bytes(example[place:begin], "little")
                of_field.append(example[begin:place])
            if place != len(example):
                raise ValueError(f"example {index} has {len(example)} bytes, and says that it has {place}")
        records: NDArray[Any] = np.frombuffer(fixed, record) if record.itemsize else np.empty(0)
        columns: Columns = {}
        for field in self.fields:
            if not _is_line(field):
                columns[field.name] = np.array(records[field.name], field.dtype)
                continue
            column = np.empty(len(lines[field.name]), object)
            column[:] = lines[field.name]
            columns[field.name] = column if field.name in texts else padded(column, field.shape[0])
        return columns


def _record(fields: Sequence[Field]) -> np.dtype[Any]:
    """Fields of one example, little-endian, one after the other."""
    return np.dtype([(f.name, np.dtype(f.dtype).newbyteorder("<"), f.shape) for f in fields])


def _is_line(field: Field) -> bool:
    """Whether a field is a line of bytes, such as a text, whose zeros at its end are not stored."""
    return field.dtype == "uint8" and len(field.shape) == 1


_collection = converter(Collection)
to_field = converter(Field)


def words(fields: Sequence[Field]) -> str:
    """Fields in readable form: `x float32[28, 28], y int64[] below 10`."""
    return ", ".join(
        f"{f.name} {f.dtype}{list(f.shape)}" + ("" if f.high is None else f" below {f.high}") for f in fields
    )


def _text(field: Field, text: str) -> NDArray[np.uint8]:
    """A text in UTF-8, with zeros at its end."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ExampleRefused(
            f"field {field.name!r} is a text with half a character, which UTF-8 cannot hold"
        ) from error
    if len(data) > field.shape[0] or data.endswith(b"\0"):
        raise ExampleRefused(
            f"field {field.name!r} is a text of {len(data)} bytes; at most {field.shape[0]} are kept, the last not 0: "
            "shorten it"
        )
    return np.frombuffer(data.ljust(field.shape[0], b"\0"), np.uint8)


def _array(field: Field, value: ArrayLike) -> NDArray[Any]:
    """The value in the field's form. Python's own numbers take the field's type; an array must have it."""
    if isinstance(value, np.ma.MaskedArray):
        raise ExampleRefused(f"field {field.name!r} is a masked array: what is masked would be stored all the same")
    if isinstance(value, str) and field.dtype == "uint8" and len(field.shape) == 1:
        return _text(field, value)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ExampleRefused(f"field {field.name!r} is a list of lists of different lengths") from error
    wanted = np.dtype(field.dtype)
    same = array.dtype.newbyteorder("=") == wanted
    typed = isinstance(value, np.ndarray | np.generic)
    fits = same or (not typed and array.dtype.kind in ("iuf" if wanted.kind == "f" else "iu"))
    if not fits or array.shape != field.shape:
        raise ExampleRefused(
            f"field {field.name!r} is {array.dtype}{list(array.shape)}, not {field.dtype}{list(field.shape)}"
        )
    if wanted.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(wanted.newbyteorder("<"), copy=False)
        if not np.isfinite(array).all():
            raise ExampleRefused(f"field {field.name!r} holds an infinity, a NaN or a number beyond {field.dtype}")
        return array
    limits = np.iinfo(field.dtype)
    least, most = (limits.min, limits.max) if field.high is None else (0, field.high - 1)
    held = (array >= least) & (array <= most) if field.high is None else field.holds(array)
    if not held.all():
        raise ExampleRefused(f"field {field.name!r} holds a value outside {least} … {most}")
    return array.astype(wanted.newbyteorder("<"), copy=False)


log = logging.getLogger(__name__)

# Written into the file's header, so that another application's database is not taken for a store.
APPLICATION_ID = 0x4D757374
VERSION = 1
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
