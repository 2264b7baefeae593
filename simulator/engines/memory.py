"""Memory, threads and precision of processes that train: a population's examples, and vectors that clients keep."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from export.model import GradientOracle, Model
from fedcore.algorithms.algorithm import Algorithm, ClientState, keeps_client_state
from fedcore.params import Float32
from simulator.errors import EngineError
from simulator.population import Population

# mallopt(3): the parameters, and a size above that of all that a step allocates.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, BYTES = -1, -3, 2**30
# madvise(2): the advice, the size of a huge page, and more bytes than a step of usual models allocates.
MADV_HUGEPAGE, HUGE_PAGE, AHEAD = 14, 2**21, 2**28
# The greatest share of a GPU's free memory for data that stays there: the rest is for training.
SHARE = 0.5


@functools.cache
def keep_freed_memory() -> None:
    """Make the C library keep freed memory, if it is glibc, and put it in huge pages, if Linux grants them.

    Otherwise it would return the memory that a step frees, and the system would clear every page again for the next
    step. A step also uses more small pages than the processor's TLB holds. This is for our own processes: those that
    the engine forks or Ray starts, and commands. A program that uses the engine keeps its allocator's settings.
    """
    library = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(library, "mallopt"):
        return
    library.mallopt(M_TRIM_THRESHOLD, BYTES)
    library.mallopt(M_MMAP_THRESHOLD, BYTES)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # The heap grows by a block, which takes no memory until it is used, and is kept for what is allocated next.
    if block := library.malloc(AHEAD):
        first = -(-block // HUGE_PAGE) * HUGE_PAGE
        library.madvise(first, AHEAD - HUGE_PAGE, MADV_HUGEPAGE)
        library.free(block)


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a compute device, or None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:  # not Linux
        return None
    return 1024 * int(meminfo["MemAvailable"].split()[0])


def may_stay(nbytes: int, device: torch.device) -> bool:
    """Whether `nbytes` may stay on a compute device: on the host always, on a GPU if they fit."""
    return device.type == "cpu" or nbytes <= SHARE * (free_bytes(device) or 0)


# The threads that torch computes with in this process.
#
# Torch's rounding of a sum depends on their number, so a simulation computes with one thread on the CPU in every
# process. This does not slow down small batches.


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread on the CPU in a block or a decorated function, and restore the number after."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Single precision on GPUs, in convolutions and recurrent layers too, as on CPUs and devices.
#
# By default torch lets cuDNN multiply float32 values there with 10 of their 23 bits after the point (TF32).

_CUDNN: Any = torch.backends.cudnn


@contextmanager
def single_precision() -> Iterator[None]:
    """Let GPUs multiply with all bits in a block or a decorated function, and restore the settings after."""
    before = _CUDNN.conv.fp32_precision, _CUDNN.rnn.fp32_precision
    _set(False, "ieee", "ieee")
    try:
        yield
    finally:
        _set("tf32" in before, *before)


def _set(allow_tf32: bool, convolutions: str, recurrent: str) -> None:
    """Set the older switch and the newer ones: torch refuses to read the first while they contradict it."""
    _CUDNN.allow_tf32 = allow_tf32
    _CUDNN.conv.fp32_precision, _CUDNN.rnn.fp32_precision = convolutions, recurrent


class Examples:
    """The examples of a population. whole: whether all lie on the compute device; by default, if they fit."""

    def __init__(self, device: torch.device, population: Population, *, whole: bool | None = None) -> None:
        self._device, self._population = device, population
        nbytes = sum(array.nbytes for array in population.fields.values())
        self._whole = may_stay(nbytes, device) if whole is None else whole
        self._fields = on_device(device if self._whole else torch.device("cpu"), population.fields)

    def of(self, clients: Sequence[int]) -> tuple[dict[str, Tensor], list[int]]:
        """Fields (n, …) on the compute device, with the examples of these clients, and where those of each begin."""
        starts = self._population.starts
        if self._whole:
            return self._fields, starts[list(clients)].tolist()
        ranges = [slice(int(starts[client]), int(starts[client + 1])) for client in clients]
        begin = np.cumsum([0, *(rows.stop - rows.start for rows in ranges)]).tolist()
        fields = {name: self._copied(array, ranges, begin[-1]) for name, array in self._fields.items()}
        return fields, begin[:-1]

    def _copied(self, array: Tensor, ranges: Sequence[slice], total: int) -> Tensor:
        """Some ranges of an array on the host, one after the other, on the compute device."""
        # From pinned memory a GPU copies asynchronously, while the CPU continues.
        pinned = self._device.type == "cuda"
        staged = torch.empty((total, *array.shape[1:]), dtype=array.dtype, pin_memory=pinned)
        torch.cat([array[rows] for rows in ranges], out=staged)
        return staged.to(self._device, non_blocking=True)


def on_device(device: torch.device, arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
    """Arrays by name as tensors on a compute device, without texts, which no model reads as they are."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for name, array in arrays.items()
        if array.dtype != object
    }


DIVERGED = "training diverged; a lower client_lr is the likely remedy"
_ZERO = "look for a logarithm, a quotient, a root or a norm of 0 in the model and its loss"


def cause(model: Model, params: Float32, population: Population, clients: Sequence[int], rounds: int) -> str:
    """The reason that training `clients` from `params`, the model after `rounds` rounds, gives no finite numbers."""
    if not np.isfinite(params).all():
        return f"the update of round {rounds} left the finite numbers: {DIVERGED}"
    for client in clients:
        for name, array in population.shard(client).items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                whose = f"field {name!r} of client {population.clients[client]!r}"
                return f"{whose} holds NaN or an infinity; mend the data set"
    batch = on_device(torch.device("cpu"), population.shard(clients[0]))
    mask = torch.ones(int(population.sizes[clients[0]]))
    loss, gradient, _ = GradientOracle(model, batch, mask)(torch.from_numpy(params))
    if rounds == 0 and not torch.isfinite(loss):
        return f"{model.spec.name} has a loss of {loss.item()} before any training, on finite examples; {_ZERO}"
    if torch.isfinite(loss) and not torch.isfinite(gradient).all():
        return f"{model.spec.name} has a finite loss, and a gradient that is not; {_ZERO}"
    return DIVERGED


# Client states: the vectors that all clients of a population keep, in memory that processes share.


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros on the CPU. Memory is only used once written to, and begins at a page, as that of large tensors does."""
    size = math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, max(1, size) * dtype.itemsize), dtype=dtype, count=size).reshape(shape)


@dataclass(slots=True)
class ClientStates:
    """The vectors of every client, float32 (N, …) by name. They are changed in place.

    They are where the engine computes, or on the host if a GPU has no room for them. On the host, forked processes
    share their memory. rows: the row of each client; a worker on another machine holds only the clients that it trains.
    """

    vectors: dict[str, Tensor]
    rows: range | dict[int, int]

    @classmethod
    def of(cls, algorithm: Algorithm, params_D: Tensor, clients: int) -> ClientStates:
        """The states of `clients` clients before the first round; empty for an algorithm without client state.

        Raises EngineError when they do not fit in the free memory.
        """
        if not keeps_client_state(algorithm):
            return cls({}, range(clients))
        initial = algorithm.init_client(params_D)
        size = sum(vector.numel() for vector in initial.values())
        needed, device = clients * size * params_D.element_size(), params_D.device
        if not may_stay(needed, device):
            device = torch.device("cpu")
        free = free_bytes(device)
        if free is not None and needed > free:
            raise EngineError(
                f"{algorithm.name} keeps {size:,} numbers for each of {clients:,} clients, {needed / 1e9:,.1f} GB in "
                f"all, and {free / 1e9:,.1f} GB are free on {device}; take a smaller model, fewer users, or "
                "an algorithm without client state"
            )
        vectors = {name: vector.to(device) for name, vector in initial.items()}
        if device.type == "cpu":
            rows = {name: shared_zeros((clients, len(vector))).copy_(vector) for name, vector in vectors.items()}
            return cls(rows, range(clients))
        return cls({name: vector.repeat(clients, 1) for name, vector in vectors.items()}, range(clients))

    def gather(self, clients: Sequence[int]) -> ClientState:
        """Copies (K, …) of some clients' vectors."""
        return {name: vectors[self._rows(clients)] for name, vectors in self.vectors.items()}

    def scatter(self, clients: Sequence[int], kept: ClientState, finite_K: Tensor) -> None:
        """Put the vectors (K, …) of some clients in place; a client that is not `finite_K` keeps what it had."""
        if not kept:
            return
        rows = torch.tensor(self._rows(clients), device=finite_K.device)[finite_K]
        for name, vectors in kept.items():
            home = self.vectors[name]
            home[rows.to(home.device)] = vectors[finite_K].to(home.device)

    def hold(self, clients: Sequence[int], kept: ClientState) -> None:
        """Hold the vectors (K, …) of only these clients from now on."""
        self.rows = {client: row for row, client in enumerate(clients)}
        self.vectors.update(kept)

    def _rows(self, clients: Sequence[int]) -> list[int]:
        return [self.rows[client] for client in clients]
