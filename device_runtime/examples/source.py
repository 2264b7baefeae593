"""Sources of local examples, their check against a plan, and the one that reads an `.npz` file."""

from __future__ import annotations

import contextlib
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from device_runtime.errors import DeviceError, ExamplesError
from fedcore.plan import ExampleSpec, Field, Tokenizer

Columns = dict[str, NDArray[Any]]
"""One array `(n, *shape)` per field, over all examples of a collection. Texts are bytes (n,), each as long as it is."""


Tokenize = Callable[[Field, Tokenizer, NDArray[np.object_]], NDArray[np.int32]]
"""Texts (n,) of a field, UTF-8, as its tokens (n, T)."""


class ExampleSource(ABC):
    """Examples in named collections. Every call reads the source again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Number of examples per collection. Raises ExamplesError when the source cannot be read."""

    @abstractmethod
    def _columns(self, spec: ExampleSpec) -> Columns:
        """The fields of `spec`, in its order. Raises ExamplesError when one is missing or cannot be read."""

    def count(self, collection: str) -> int:
        """Number of examples in a collection; 0 when no collection has that name."""
        return self.counts().get(collection, 0)

    def count_recent(self, collection: str, max_age_s: float) -> int:
        """Number of examples that are at most `max_age_s` old; 0 in a source that does not know their age."""
        return 0

    def load(self, spec: ExampleSpec, least: int = 1, tokenize: Tokenize | None = None) -> Columns:
        """The examples that a plan runs on: `(n, *shape)` for each field of `spec`, n at least `least` and 1.

        Those that `spec` holds out are left out: they reach nothing that runs a graph. tokenize: makes tokens of the
        texts of fields that have a tokenizer (text.py). Raises ExamplesError, with
        reason "too-few-examples" when too few are left, "invalid-examples" when a field is missing, or has another
        dtype or shape than `spec` says, or holds an infinity, a NaN or a number out of range.
        """
        none = ExamplesError("too-few-examples", f"no examples in collection {spec.collection!r}", str(self.path))
        if self.count(spec.collection) == 0:
            raise none
        columns = self._columns(spec)
        for field in spec.fields:
            column, tokenizer = columns[field.name], field.tokenizer
            if tokenize is not None and tokenizer is not UNSET and _is_texts(column):
                columns[field.name] = tokenize(field, tokenizer, unpadded(column))
            _check(field, columns[field.name])
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise invalid(f"fields differ in their number of examples: {lengths}")
        if 0 in lengths.values():
            raise none  # an application removed them since they were counted
        if spec.hold_out is not None:
            columns = _on_side(spec, columns)
        left, least = len(next(iter(columns.values()))), max(least, 1)
        if left < least:
            detail = f"the plan runs on {left} examples of collection {spec.collection!r}, and the task needs {least}"
            raise ExamplesError("too-few-examples", detail, str(self.path))
        return columns


def unpadded(texts: NDArray[Any]) -> NDArray[np.object_]:
    """Texts (n,) as bytes, each as long as it is, of those with zeros at their ends, uint8 (n, bytes)."""
    if texts.dtype == object:
        return texts
    rows = np.empty(len(texts), object)
    rows[:] = [row.tobytes().rstrip(b"\0") for row in texts]
    return rows


def padded(texts: NDArray[Any], size: int) -> NDArray[np.uint8]:
    """Bytes (n,) of at most `size` each, with zeros at their ends: uint8 (n, size)."""
    return np.array(texts.tolist(), f"S{size}").view(np.uint8).reshape(len(texts), size)


def invalid(detail: str, private: str = "") -> ExamplesError:
    """The error for invalid examples; `private` is only for this device's owner."""
    return ExamplesError("invalid-examples", detail, private)


def _is_texts(column: NDArray[Any]) -> bool:
    return column.dtype == object or (column.dtype == np.uint8 and column.ndim == 2)


def _on_side(spec: ExampleSpec, columns: Columns) -> Columns:
    kept = spec.kept(columns)
    return {name: column[kept] for name, column in columns.items()}


def _check(field: Field, column: NDArray[Any]) -> None:
    """Raise ExamplesError unless `column` is `(n, *field.shape)` of the field's dtype, finite and in range."""
    if column.dtype != np.dtype(field.dtype) or column.shape[1:] != field.shape or not column.shape:
        raise invalid(
            f"field {field.name!r} holds {column.dtype}{list(column.shape)}, "
            f"the plan wants {field.dtype}{['n', *field.shape]}"
        )
    if column.dtype.kind == "f":
        _demand(np.isfinite(column), field, "holds an infinity or NaN")
    elif field.high is not None:
        _demand(field.holds(column), field, f"holds a value outside 0 … {field.high - 1}")


def _demand(good: NDArray[np.bool_], field: Field, otherwise: str) -> None:
    """Raise ExamplesError, naming the first example with a bad value."""
    examples = good.reshape(len(good), math.prod(good.shape[1:])).all(axis=1)
    if not examples.all():
        raise invalid(f"field {field.name!r} of example {int(examples.argmin())} {otherwise}")


HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class NpzFile(ExampleSource):
    """A NumPy `.npz` file: one array per field, whose first axis counts examples. It is collection "default"."""

    def counts(self) -> dict[str, int]:
        """Number of examples per collection. Raises ExamplesError when the file cannot be read."""
        with self._members() as members:
            # Only headers: a device that is not selected should not read its data.
            shapes = [_npy_shape(members, name) for name in _fields(members)]
        return {"default": min((shape[0] for shape in shapes if shape), default=0)}

    def columns(self) -> Columns:
        """All fields, by name. Raises ExamplesError when the file cannot be read."""
        with self._members() as members:
            return {name: _npy(members, name) for name in _fields(members)}

    def _columns(self, spec: ExampleSpec) -> Columns:
        with self._members() as members:
            missing = sorted({field.name for field in spec.fields} - set(_fields(members)))
            if missing:
                raise invalid(f"examples have no field {missing}, they have {_fields(members)}", str(self.path))
            return {field.name: _npy(members, field.name) for field in spec.fields}

    @contextlib.contextmanager
    def _members(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as members:
                yield members
        except DeviceError:
            raise
        except Exception as error:  # zip and NumPy answer damage with a dozen kinds of errors, MemoryError among them
            raise invalid("the examples cannot be read", f"{self.path}: {error}") from error


def _fields(members: zipfile.ZipFile) -> list[str]:
    return sorted(name.removesuffix(".npy") for name in members.namelist() if name.endswith(".npy"))


def _npy(members: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with members.open(f"{name}.npy") as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array


def _npy_shape(members: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    with members.open(f"{name}.npy") as file:
        read = HEADERS.get(np.lib.format.read_magic(file))
        if read is None:
            raise invalid(f"field {name!r} is in a format of NumPy's that is not for plain arrays")
        shape, _, dtype = read(file)
        data_bytes = members.getinfo(f"{name}.npy").file_size - file.tell()
        if not dtype.hasobject and (min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != data_bytes):
            raise invalid(f"field {name!r} says that it is {dtype}{list(shape)}, which its {data_bytes} bytes are not")
        return shape
