"""The example store of a host application: a SQLite file that the app appends to and the device trains from."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from device_runtime.examples.source import Columns, ExampleSource, invalid
from fedcore.plan import ExampleSpec, Field

# Written into the file's header, so that another application's database is not taken for a store.
APPLICATION_ID = 0x4D757374
VERSION = 1
SCHEMA = f"""
BEGIN;
CREATE TABLE examples (
    id INTEGER PRIMARY KEY,
    collection TEXT NOT NULL,
    fields BLOB NOT NULL -- msgpack {{name: [dtype, shape, bytes]}}, the bytes little-endian and row-major
);
CREATE INDEX examples_by_collection ON examples (collection, id);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """One field of one example."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class ExampleStore(ExampleSource):
    """A SQLite file. An app may append while a device reads; each example goes to one collection."""

    def append(self, examples: Iterable[Mapping[str, NDArray[Any]]], collection: str = "default") -> None:
        """Add examples, all or none; the file is created when missing. Raises ExamplesError when it cannot be written.

        Each is one array per field, without a batch axis, stored as it is: give it the plan's dtype and shape.
        Raises TypeError when one is not of numbers.
        """
        rows = [(collection, msgspec.msgpack.encode({n: _stored(a) for n, a in one.items()})) for one in examples]
        with self._connection() as connection:
            if not self.path.stat().st_size:
                connection.executescript(SCHEMA)
            self._check_ours(connection)
            with connection:
                connection.executemany("INSERT INTO examples (collection, fields) VALUES (?, ?)", rows)

    def counts(self) -> dict[str, int]:
        """Number of examples per collection. Raises ExamplesError when the file cannot be read."""
        with self._connection() as connection:
            self._check_ours(connection)
            return dict(connection.execute("SELECT collection, count(*) FROM examples GROUP BY collection"))

    def _columns(self, spec: ExampleSpec) -> Columns:
        with self._connection() as connection:
            self._check_ours(connection)
            query = "SELECT fields FROM examples WHERE collection = ? ORDER BY id"
            rows = [_decode(index, row[0]) for index, row in enumerate(connection.execute(query, (spec.collection,)))]
        return {field.name: _column(field, rows) for field in spec.fields}

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(self.path)) as connection:
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise invalid("the example store failed", f"{self.path}: {error}") from error

    def _check_ours(self, connection: sqlite3.Connection) -> None:
        found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        if found != [APPLICATION_ID, VERSION]:
            raise invalid(f"the examples are in SQLite, but not an example store of version {VERSION}", str(self.path))


def _stored(array: NDArray[Any]) -> Stored:
    array = np.asarray(array)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"an example holds numbers, not {array.dtype}")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Stored(little.dtype.name, little.shape, little.tobytes())


def _decode(index: int, data: bytes) -> dict[str, Stored]:
    try:
        return msgspec.msgpack.decode(data, type=dict[str, Stored])
    except msgspec.MsgspecError as error:
        raise invalid(f"example {index} cannot be read: {error}") from error


def _column(field: Field, rows: list[dict[str, Stored]]) -> NDArray[Any]:
    """The arrays of one field, stacked. Raises ExamplesError, naming the first example that does not fit."""
    dtype = np.dtype(field.dtype).newbyteorder("<")
    size = dtype.itemsize * int(np.prod(field.shape, dtype=np.int64))
    for index, row in enumerate(rows):
        stored = row.get(field.name)
        if stored is None:
            raise invalid(f"example {index} has no field {field.name!r}, it has {sorted(row)}")
        if stored.dtype != field.dtype or stored.shape != field.shape or len(stored.data) != size:
            raise invalid(
                f"field {field.name!r} of example {index} is {stored.dtype}{list(stored.shape)} "
                f"in {len(stored.data)} bytes, the plan wants {field.dtype}{list(field.shape)}"
            )
    joined = np.frombuffer(b"".join(row[field.name].data for row in rows), dtype)
    return joined.reshape(len(rows), *field.shape)
