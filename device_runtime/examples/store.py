"""The example store of a host application, which devices train from, and imports from files."""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import numbers
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from device_runtime.errors import ExampleRefused, SealBroken, StoreDamaged, StoreError
from device_runtime.examples.database import Collection, Example, ExampleDatabase, Retention, words
from device_runtime.examples.source import Columns, ExampleSource, NpzFile, invalid
from device_runtime.state.folder import KeyFile, KeyStore, Sealer
from fedcore.plan import ExampleSpec, Field
from fedcore.validation import UNDECODABLE, decoder

_COLLECTION = decoder(Collection)

FILE = "examples.db"
EARLIEST = 1_767_225_600.0
"""The first second of 2026. A clock before it was reset, as by an empty battery, and says nothing about ages."""
T = TypeVar("T")


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an append: examples added, examples removed by retention, and where a damaged store was put."""

    added: int
    removed: int
    put_aside: str | None = None


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one collection. Times are in seconds since 1970; None without examples."""

    collection: str
    examples: int
    bytes: int
    oldest: float | None
    newest: float | None
    fields: tuple[Field, ...]
    retention: Retention


class ExampleStore(ExampleSource):
    """A SQLite file. An app may append while a device reads, from another process too; examples never leave it.

    Methods raise StoreError when the file cannot be used, and ExamplesError when it is no example store. A damaged file
    is moved to `put_aside`, and a new one is made. Appending continues there; any other call raises StoreDamaged, once.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, keystore: KeyStore | None = None) -> None:
        """The store in the file `path`; `clock` gives seconds since 1970, `keystore` the key that seals examples.

        Without `keystore` the key is in a file beside the store, named with the suffix `.key`, which only its owner may
        read.
        """
        super().__init__(path)
        self._sealer = Sealer(keystore or KeyFile(path.with_name(f"{path.name}.key")))
        self.put_aside: Path | None = None
        self._database = ExampleDatabase(path)
        self._clock = clock

    @classmethod
    def open(
        cls, folder: Path, clock: Callable[[], float] = time.time, keystore: KeyStore | None = None
    ) -> ExampleStore:
        """The store in its own folder. Both are made when missing."""
        store = cls(folder / FILE, clock, keystore)
        store._going_on(store._database.create)
        return store

    def declare(self, collection: Collection) -> None:
        """Declare a collection's fields and retention. It may be declared again with the same fields.

        Raises ExampleRefused when no plan could use such examples, or the collection already has other fields.
        """
        self.extend(collection, ())

    def declared(self, name: str) -> Collection | None:
        """A collection as it was declared; None when it was not."""
        return self._going_on(lambda: self._declared(name))

    def append(self, collection: str, example: Example, at: float | None = None) -> Appended:
        """Add one example to a declared collection, at a time in seconds since 1970: now if not given, and at most now.

        Python's numbers and lists take the type of the field; an array must have it. Raises ExampleRefused, naming the
        field, when the example is not what was declared, or holds an infinity, a NaN or a number out of range.
        """
        return self.append_all(collection, [example], at)

    def append_all(self, collection: str, examples: Iterable[Example], at: float | None = None) -> Appended:
        """Add all of several examples, or none; see `append`."""
        return self.extend(self._known(collection), examples, at)

    def extend(self, collection: Collection, examples: Iterable[Example], at: float | None = None) -> Appended:
        """Declare a collection and add examples to it, in one transaction. See `declare` and `append`."""
        collection = collection.checked()
        at = None if at is None else _seconds(at)
        what = _what(collection)
        rows = [self._sealer.seal(what, collection.encode(example)) for example in examples]
        removed = self._going_on(lambda: self._insert(collection, rows, at))
        return Appended(
            added=len(rows), removed=removed, put_aside=None if self.put_aside is None else str(self.put_aside)
        )

    def retain(self, collection: str, retention: Retention) -> int:
        """Change the retention of a declared collection. Returns the number of removed examples, which are the oldest.

        Raises ExampleRefused when it was not declared, or the retention could not keep a single example.
        """
        return self.extend(replace(self._known(collection), retention=retention), ()).removed

    def delete(self, collection: str | None = None, before: float | None = None) -> int:
        """Remove examples of one or all collections, from before a time or all. Returns the number of removed examples.

        Without a time the declarations are removed too.
        """
        with self._database.writing() as connection:
            ids = [key for key, declared in _collections(connection) if collection in {None, declared.name}]
            removed = 0
            for key in ids:
                oldest = connection.execute(
                    "DELETE FROM examples WHERE collection = ? AND at < ?",
                    (key, math.inf if before is None else before),
                )
                removed += oldest.rowcount
                if before is None:
                    connection.execute("DELETE FROM collections WHERE id = ?", (key,))
        # The examples are gone; shrinking the file may fail and can wait.
        with contextlib.suppress(StoreError), self._database.reading() as connection:
            connection.executescript("PRAGMA incremental_vacuum")
        return removed

    def holdings(self) -> list[Holding]:
        """The content of each declared collection, by name."""
        self._enforce()
        with self._database.reading() as connection:
            return [_holding(connection, key, collection) for key, collection in _collections(connection)]

    def counts(self) -> dict[str, int]:
        """Number of examples of each non-empty collection, after retention."""
        return {holding.collection: holding.examples for holding in self.holdings() if holding.examples}

    def count_recent(self, collection: str, max_age_s: float) -> int:
        """Number of examples that are at most `max_age_s` old."""
        self._enforce()
        query = "SELECT count(*) FROM examples WHERE collection = ? AND at >= ?"
        with self._database.reading() as connection:
            entry = _find(connection, collection)
            row = connection.execute(query, (entry[0], self._clock() - max_age_s)).fetchone() if entry else (0,)
        return int(row[0])

    def _columns(self, spec: ExampleSpec) -> Columns:
        with self._database.reading() as connection:
            entry = _find(connection, spec.collection)
            if entry is None:
                raise invalid(f"there is no collection {spec.collection!r}", str(self.path))
            key, collection = entry
            _check_fields(spec, collection)
            texts = {field.name for field in spec.fields if field.tokenizer is not UNSET}
            try:
                columns = collection.decode(self._opened(connection, key, collection), texts)
            except ValueError as error:
                raise invalid(str(error), str(self.path)) from error
        return {field.name: columns[field.name] for field in spec.fields}

    def _opened(self, connection: sqlite3.Connection, key: int, collection: Collection) -> Iterator[bytes]:
        """All examples of a collection in the order of their insertion."""
        what = _what(collection)
        query = "SELECT data FROM examples WHERE collection = ? ORDER BY id"
        for index, (sealed,) in enumerate(connection.execute(query, (key,))):
            try:
                yield self._sealer.open(what, sealed)
            except SealBroken as error:
                raise invalid(f"example {index} was changed, or sealed under another key", str(self.path)) from error

    def _known(self, name: str) -> Collection:
        collection = self.declared(name)
        if collection is None:
            raise ExampleRefused(f"no collection {name!r} was declared in {self.path}; declare its fields first")
        return collection

    def _declared(self, name: str) -> Collection | None:
        with self._database.reading() as connection:
            entry = _find(connection, name)
        return entry[1] if entry else None

    def _insert(self, collection: Collection, rows: list[bytes], at: float | None) -> int:
        now = self._clock()
        with self._database.writing() as connection:
            key = _declare(connection, collection)
            values = ((key, now if at is None else at, row) for row in rows)  # `_drop` holds it to now
            connection.executemany("INSERT INTO examples (collection, at, data) VALUES (?, ?, ?)", values)
            return _drop(connection, key, collection, now)

    def _enforce(self) -> None:
        """Remove examples that exceed retention. Without any, nothing is written, so the store may be read-only."""
        now = self._clock()
        with self._database.reading() as connection:
            due = any(
                _ahead(connection, key, now) or _overdue(connection, key, collection, now)
                for key, collection in _collections(connection)
            )
        if due:
            with self._database.writing() as connection:
                for key, collection in _collections(connection):
                    _drop(connection, key, collection, now)

    def _going_on(self, work: Callable[[], T]) -> T:
        """The work's result, in the new store if the old one was damaged."""
        try:
            return work()
        except StoreDamaged as damaged:
            self.put_aside = damaged.kept
            return work()


def _seconds(at: float) -> float:
    if isinstance(at, numbers.Real) and not isinstance(at, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(at):
                return float(at)
    raise ExampleRefused(f"examples cannot be of the time given, a {type(at).__name__}: give finite seconds since 1970")


def _collections(connection: sqlite3.Connection) -> list[tuple[int, Collection]]:
    rows = connection.execute("SELECT id, declaration FROM collections ORDER BY name").fetchall()
    try:
        return [(key, _COLLECTION.decode(declaration)) for key, declaration in rows]
    except msgspec.MsgspecError as error:
        raise invalid(f"a collection's declaration cannot be read: {error}") from error


def _find(connection: sqlite3.Connection, name: str) -> tuple[int, Collection] | None:
    return next((entry for entry in _collections(connection) if entry[1].name == name), None)


def _declare(connection: sqlite3.Connection, collection: Collection) -> int:
    """The id of a collection, after declaring it if necessary. A changed retention replaces the old one."""
    entry = _find(connection, collection.name)
    if entry and entry[1].fields != collection.fields:
        raise ExampleRefused(
            f"collection {collection.name!r} was declared with {words(entry[1].fields)}, not "
            f"{words(collection.fields)}; delete it first, or use another name"
        )
    query = (
        "INSERT INTO collections (name, declaration) VALUES (?, ?) "
        "ON CONFLICT (name) DO UPDATE SET declaration = excluded.declaration RETURNING id"
    )
    return int(connection.execute(query, (collection.name, msgspec.json.encode(collection))).fetchone()[0])


def _overdue(connection: sqlite3.Connection, key: int, collection: Collection, now: float) -> int:
    """The number of examples that exceed retention; they are the oldest."""
    age = math.inf if collection.retention.max_age_s is None else collection.retention.max_age_s
    query = "SELECT count(*), count(*) FILTER (WHERE at < ?) FROM examples WHERE collection = ?"
    examples, old = connection.execute(query, (now - age, key)).fetchone()
    most = collection.most
    return max(int(old), 0 if most is None else int(examples) - most)


def _ahead(connection: sqlite3.Connection, key: int, now: float) -> bool:
    """Whether an example is of the future: the clock was ahead when it came."""
    query = "SELECT count(*) FROM examples WHERE collection = ? AND at > ?"
    return now >= EARLIEST and bool(connection.execute(query, (key, now)).fetchone()[0])


def _drop(connection: sqlite3.Connection, key: int, collection: Collection, now: float) -> int:
    """Remove examples that exceed retention. Returns their number.

    Those of the future are of now from here on: else they would never be too old, and later ones would go first.
    """
    if _ahead(connection, key, now):
        connection.execute("UPDATE examples SET at = ? WHERE collection = ? AND at > ?", (now, key, now))
    overdue = _overdue(connection, key, collection, now)
    oldest = "SELECT id FROM examples WHERE collection = ? ORDER BY at, id LIMIT ?"
    connection.execute(f"DELETE FROM examples WHERE id IN ({oldest})", (key, overdue))  # noqa: S608
    return overdue


def _holding(connection: sqlite3.Connection, key: int, collection: Collection) -> Holding:
    query = "SELECT count(*), min(at), max(at) FROM examples WHERE collection = ?"
    examples, oldest, newest = connection.execute(query, (key,)).fetchone()
    return Holding(
        collection=collection.name,
        examples=examples,
        bytes=examples * collection.example_bytes,
        oldest=oldest,
        newest=newest,
        fields=collection.fields,
        retention=collection.retention,
    )


def _what(collection: Collection) -> str:
    """The name under which examples of a collection are sealed."""
    return f"example of {collection.name}"


def _check_fields(spec: ExampleSpec, collection: Collection) -> None:
    """Raise ExamplesError unless the collection has the fields that a plan names, in its dtypes and shapes."""
    have = {field.name: field for field in collection.fields}
    for wanted in spec.fields:
        if wanted.name not in have:
            raise invalid(f"collection {collection.name!r} has no field {wanted.name!r}, it has {sorted(have)}")
        field = have[wanted.name]
        is_text = wanted.tokenizer is not UNSET and field.dtype == "uint8" and len(field.shape) == 1
        if (field.dtype, field.shape) != (wanted.dtype, wanted.shape) and not is_text:
            raise invalid(
                f"field {field.name!r} holds {field.dtype}{list(field.shape)}, "
                f"the plan wants {wanted.dtype}{list(wanted.shape)}"
            )


_OBJECT = decoder(dict[str, Any])


def import_file(
    store: ExampleStore, path: Path, name: str = "default", fields: tuple[Field, ...] | None = None
) -> Appended:
    """Add all examples of a file to a collection, or none if one of them is refused. The suffix tells the file's kind.

    `fields` declare a new collection; an `.npz` file declares it by its content. Raises ExampleRefused, naming file,
    row and field; ExamplesError for a malformed `.npz` file; OSError; what ExampleStore raises.
    """
    if path.suffix not in READERS:
        raise ExampleRefused(f"{path}: files of examples are called {', '.join(f'*{suffix}' for suffix in READERS)}")
    declared = store.declared(name)
    if declared is not None:
        collection = Collection(name, fields or declared.fields, declared.retention)
    elif fields or path.suffix == ".npz":
        collection = Collection(name, fields or _npz_fields(path))
    else:
        raise ExampleRefused(f"collection {name!r} is new: say what its fields are")
    rows = _Rows(READERS[path.suffix](path, collection.checked()))
    try:
        return store.extend(collection, rows)
    except (ExampleRefused, UnicodeDecodeError, csv.Error) as error:
        detail = error.detail if isinstance(error, ExampleRefused) else "it is not text in UTF-8, or no CSV"
        raise ExampleRefused(f"{path}: {rows.place}{detail}") from error


Rows = Iterator[tuple[str, Callable[[], Example]]]
"""The position of an example in its file, and the function that parses it."""


class _Rows:
    """Examples one after the other; `place` is the position of the last one in the file."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.place = ""

    def __iter__(self) -> Iterator[Example]:
        for place, parse in self._rows:
            self.place = f"{place}: "
            yield parse()
        self.place = ""


def _npz(path: Path, collection: Collection) -> Rows:
    """Arrays whose first axis counts examples, one per field."""
    columns = NpzFile(path).columns()
    lengths = {name: len(column) for name, column in columns.items() if column.shape}
    if len(lengths) < len(columns) or len(set(lengths.values())) > 1:
        raise ExampleRefused(f"{path}: arrays differ in their number of examples: {lengths}")
    for index in range(max(lengths.values(), default=0)):
        yield f"example {index}", partial(_nth, columns, index)


def _nth(columns: Columns, index: int) -> Example:
    return {name: column[index] for name, column in columns.items()}


def _npz_fields(path: Path) -> tuple[Field, ...]:
    columns = NpzFile(path).columns()
    return tuple(Field(name, column.dtype.name, column.shape[1:]) for name, column in columns.items())  # type: ignore[arg-type]


def _jsonl(path: Path, collection: Collection) -> Rows:
    """One object a line: fields by name, numbers or nested lists of them."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", partial(_object, line)


def _object(line: bytes) -> Example:
    try:
        return _OBJECT.decode(line)
    except UNDECODABLE as error:
        raise ExampleRefused("this is not a JSON object of fields and numbers") from error


def _csv(path: Path, collection: Collection) -> Rows:
    """A header, then one example a line: column `y` for a single number, `x.0`, `x.1`, … row by row for an array."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        wanted = list(itertools.chain.from_iterable(map(_column_names, collection.fields)))
        missing, foreign = sorted(set(wanted) - set(header)), sorted(set(header) - set(wanted))
        if missing or foreign or len(header) != len(wanted):
            raise ExampleRefused(f"{path}: the header lacks columns {missing[:5]} or has others {foreign[:5]} or twice")
        places = [(field, [header.index(name) for name in _column_names(field)]) for field in collection.fields]
        for cells in reader:
            if cells:
                yield f"line {reader.line_num}", partial(_cells, places, cells, len(header))


def _cells(places: list[tuple[Field, list[int]]], cells: list[str], width: int) -> Example:
    if len(cells) != width:
        raise ExampleRefused(f"this has {len(cells)} cells, the header {width}")
    return {field.name: _value(field, [cells[index] for index in indices]) for field, indices in places}


def _value(field: Field, cells: list[str]) -> Any:
    kind, what = (float, "numbers") if field.dtype == "float32" else (int, "whole numbers")
    try:
        if any("_" in cell for cell in cells):
            raise ValueError("Python would read 1_000 as 1000")
        values = [kind(cell) for cell in cells]
    except ValueError as error:
        raise ExampleRefused(f"field {field.name!r} must be {what}") from error
    return np.array(values).reshape(field.shape).tolist()


def _column_names(field: Field) -> list[str]:
    if not field.shape:
        return [field.name]
    return [f"{field.name}.{index}" for index in range(int(np.prod(field.shape)))]


READERS: dict[str, Callable[[Path, Collection], Rows]] = {".npz": _npz, ".jsonl": _jsonl, ".csv": _csv}
