"""The allocator of this process, told to keep the memory that a training step frees for the next step."""

from __future__ import annotations

import ctypes
import sys

# mallopt(3): the parameters, and a size above that of all that a step allocates.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, BYTES = -1, -3, 2**30


def keep_freed_memory() -> None:
    """Make the C library keep freed memory, where it is glibc.

    It would give back what a step frees, and the system would clear every page again for the next step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, BYTES)
        mallopt(M_MMAP_THRESHOLD, BYTES)
