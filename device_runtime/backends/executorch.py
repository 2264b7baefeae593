"""ExecuTorch on one CPU thread, through the C interface of device_runtime/native/executorch_shim.cpp: no torch.

A program has two methods: `forward`, and `ports`, which returns a uint8 vector that holds UTF-8 JSON: the names of the
inputs and of the outputs of `forward`, in their order, as {"inputs": [...], "outputs": [...]}. Shapes are fixed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from device_runtime.backends.backend import Arrays, Edge, Executable, address
from device_runtime.errors import PlanRefused, RuntimeFailed
from device_runtime.native.library import VERSION, library
from fedcore.validation import decoder

KEPT = 2
# ExecuTorch's numbers of its element types.
DTYPES = {
    number: np.dtype(name)
    for number, name in enumerate(("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"))
} | {11: np.dtype("bool")}


class _Names(msgspec.Struct):
    inputs: list[str]
    outputs: list[str]


_NAMES = decoder(_Names)


@dataclass(frozen=True, slots=True)
class _Port:
    """One input or output: the type and shape of the arrays that can be bound to it."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class ExecuTorch:
    """The backend of ExecuTorch programs. Raises ConfigError when its library is not built."""

    format = "executorch"
    runtime = f"executorch {VERSION}"

    def __init__(self) -> None:
        self._library = library()

    def load(self, graph: bytes, name: str = "graph") -> Executable:
        """Prepare a program. Raises PlanRefused when ExecuTorch cannot read it or lacks one of its operators."""
        return _Program(self._library, graph, name)


class _Program:
    """A loaded program with the pointers of the last few sets of arrays: a device loop alternates between two."""

    def __init__(self, library: ctypes.CDLL, graph: bytes, name: str) -> None:
        self._library, self._name = library, name
        self._bytes = graph  # the loaded program points into it
        self._handle = library.muster_load(graph, len(graph))
        if not self._handle:
            raise self._refused()
        names = self._names()
        self._inputs, self._outputs = self._ports(names.inputs, 0), self._ports(names.outputs, 1)
        self._edge = Edge(name, frozenset(names.inputs), frozenset(names.outputs))
        # A kept binding references its arrays, so their addresses stay valid and an id always means the same array.
        self._kept: dict[tuple[object, ...], tuple[Any, Any, list[NDArray[Any]]]] = {}

    def __del__(self) -> None:
        self._library.muster_unload(self._handle)

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        """Compute `outputs` from `inputs`: see Executable. Bindings of known arrays are reused."""
        self._edge.check_names(inputs, outputs)
        key = (*[id(inputs[port.name]) for port in self._inputs], *map(id, outputs.values()), *outputs)
        if key not in self._kept:
            bound = self._bind(inputs, outputs)
            if len(self._kept) == KEPT:
                self._kept.clear()
            self._kept[key] = bound
        sources, targets, _ = self._kept[key]
        if not self._library.muster_run(self._handle, sources, targets):
            raise RuntimeFailed(f"graph {self._name!r} failed", self._failure())

    def _bind(self, inputs: Arrays, outputs: Arrays) -> tuple[Any, Any, list[NDArray[Any]]]:
        self._edge.check_memory(inputs, outputs)
        sources = [inputs[port.name] for port in self._inputs]
        # The program computes every output, even those that the caller did not request.
        targets = [
            outputs[port.name] if port.name in outputs else np.empty(port.shape, port.dtype) for port in self._outputs
        ]
        for port, array in zip((*self._inputs, *self._outputs), (*sources, *targets), strict=True):
            self._refuse_misfit(port, array)
        arrays = [*(inputs[port.name] for port in self._inputs), *outputs.values(), *targets]
        return _addresses(sources), _addresses(targets), arrays

    def _refuse_misfit(self, port: _Port, array: NDArray[Any]) -> None:
        if (array.dtype, array.shape) != (port.dtype, port.shape):
            raise RuntimeFailed(
                f"graph {self._name!r} failed",
                f"{port.name!r} is {port.dtype} {list(port.shape)}, not {array.dtype} {list(array.shape)}",
            )

    def _names(self) -> _Names:
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        if not self._library.muster_constant(self._handle, b"ports", ctypes.byref(data), ctypes.byref(size)):
            raise self._refused()
        try:
            return _NAMES.decode(ctypes.string_at(data, size.value))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PlanRefused(f"ExecuTorch program {self._name!r} does not name its ports: {error}") from error

    def _ports(self, names: list[str], output: int) -> list[_Port]:
        count = self._library.muster_count(self._handle, output)
        if len(set(names)) != count or len(names) != count:
            raise PlanRefused(f"ExecuTorch program {self._name!r} has {count} ports, not one for each of {names}")
        return [self._port(name, output, index) for index, name in enumerate(names)]

    def _port(self, name: str, output: int, index: int) -> _Port:
        kind, sizes, rank = ctypes.c_int(), ctypes.POINTER(ctypes.c_int32)(), ctypes.c_size_t()
        where = ctypes.byref(kind), ctypes.byref(sizes), ctypes.byref(rank)
        if not self._library.muster_port(self._handle, output, index, *where):
            raise self._refused()
        if kind.value not in DTYPES:
            raise PlanRefused(f"port {name!r} of ExecuTorch program {self._name!r} has the unknown type {kind.value}")
        return _Port(name, DTYPES[kind.value], tuple(sizes[: rank.value]))

    def _refused(self) -> PlanRefused:
        return PlanRefused(f"ExecuTorch cannot load graph {self._name!r}: {self._failure()}")

    def _failure(self) -> str:
        text: bytes = self._library.muster_failure()
        return text.decode(errors="replace")


def _addresses(arrays: list[NDArray[Any]]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*map(address, arrays))
