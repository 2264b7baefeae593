"""Calls of the Linux kernel for which Python has no function."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

# <linux/prctl.h>
PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
# <linux/capability.h>
_CAPABILITY_VERSION = 0x20080522


def prctl(option: int, value: int) -> None:
    """Set one property of this process. Raises OSError."""
    _call("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def syscall(number: int, *arguments: object) -> int:
    """Make a system call by its number. Raises OSError."""
    return _call("syscall", number, *arguments)


def hide_memory() -> None:
    """On Linux, keep the user's other processes from reading this one's memory and tracing it.

    It also leaves no core dump. A program that this process executes is not protected.
    """
    if sys.platform == "linux":
        prctl(_PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """Permanently give up all of root's capabilities that this process has. Raises OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, first: object, *others: object) -> int:
    answer: int = getattr(_library(), name)(first, *others)
    if answer == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return answer
