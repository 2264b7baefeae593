"""Examples in a NumPy `.npz` file."""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.errors import DeviceError
from device_runtime.examples.source import Columns, ExampleSource, invalid
from fedcore.plan import ExampleSpec

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
