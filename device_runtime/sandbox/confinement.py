"""Confinement: the rights that a process permanently gives up before it reads a graph, as far as the system allows.

docs/device.md, "Where graphs run"; why: docs/decisions/0030-sandbox.md.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from pathlib import Path

from device_runtime.errors import RuntimeFailed
from device_runtime.sandbox import kernel
from device_runtime.trainer import Limits, bound

STACK_BYTES = 8 * 2**20


def lacking() -> tuple[str, ...]:
    """The defences that this system lacks or that are not used on it; empty if the sandbox has all of them."""
    if sys.platform == "linux":
        filtered, version = kernel.seccomp_offered(), kernel.landlock_version()
        wanted = 1 if filtered else kernel.WHOLE_LANDLOCK  # the filter refuses what an older version leaves open
        lacks = () if version >= wanted else (f"Landlock {kernel.WHOLE_LANDLOCK} (there is {version or 'none'})",)
        return lacks if filtered else (*lacks, "seccomp")
    return ("a limit on memory",) if sys.platform == "darwin" else ("all but limits on descriptors, time and files",)


def confine(limits: Limits) -> None:
    """Permanently give up what training does not need. Raises RuntimeFailed when an offered defence fails."""
    try:
        if sys.platform == "linux":
            bound(resource.RLIMIT_AS, _beside_data() + limits.memory_bytes)
        _give_up_paths()
        _limit(limits)
        if sys.platform == "linux" and kernel.seccomp_offered():
            kernel.restrict_calls()
    except OSError as error:
        raise RuntimeFailed("the sandbox cannot be closed", str(error)) from error


def _give_up_paths() -> None:
    """Give up paths and other processes. This needs descriptors, so it comes before the limit on them."""
    if sys.platform == "linux":
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if os.geteuid() == 0:  # other users have no capabilities, and a filter around the device may refuse this call
            kernel.drop_capabilities()
        if kernel.landlock_version():
            kernel.restrict_paths()
    elif sys.platform == "darwin":
        message = ctypes.c_char_p()  # <sandbox.h>: kSBXProfilePureComputation, SANDBOX_NAMED
        if ctypes.CDLL(None).sandbox_init(b"pure-computation", ctypes.c_uint64(1), ctypes.byref(message)):
            raise OSError(errno.EPERM, (message.value or b"").decode(errors="replace"))


def _beside_data() -> int:
    """Bytes of this process's address space that are not data: libraries, reserves, and room for the stack to grow.

    The limit on data covers private writable memory, but not shared or read-only memory, nor memory that grows
    downwards.
    So the whole address space has a limit too: the present size without data, plus the allowed data.
    """
    size, *_, data, _ = map(int, Path("/proc/self/statm").read_bytes().split())
    return (size - data) * resource.getpagesize() + STACK_BYTES


def _limit(limits: Limits) -> None:
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))
    limits.bound()
    for kind, later in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 0), (resource.RLIMIT_CPU, 1)):
        soft, hard = resource.getrlimit(kind)
        if soft != hard:  # SIGXCPU comes at the limit, and SIGKILL a second later
            resource.setrlimit(kind, (soft, soft + later))
