"""Import of examples from files: NumPy `.npz`, JSON lines, CSV. A file is imported whole or not at all."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from device_runtime.errors import ExampleRefused
from device_runtime.examples.collection import Collection, Example
from device_runtime.examples.npz import NpzFile
from device_runtime.examples.source import Columns
from device_runtime.examples.store import Appended, ExampleStore
from fedcore.decoding import UNDECODABLE, decoder
from fedcore.plan import Field

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
