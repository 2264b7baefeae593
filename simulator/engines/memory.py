"""Memory, threads and precision of the processes that train."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

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


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread on the CPU in a block or a decorated function, and restore the number after."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
