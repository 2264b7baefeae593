"""Calls of the Linux kernel for which Python has no function: Landlock, seccomp and capabilities."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
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


# From this version on (Linux 6.12) it covers all of its kinds: paths, TCP, signals, abstract sockets.
WHOLE_LANDLOCK = 6
# Landlock: a process gives up paths, TCP ports, and other processes, as far as the kernel supports it.
#
# <linux/landlock.h>. It does not cover the modes, owners, times and attributes of files, nor System V queues.

_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_ASK_VERSION = 1


class _Ruleset(ctypes.Structure):
    """The rights to give up, one bit each."""

    _fields_ = (("paths", ctypes.c_uint64), ("ports", ctypes.c_uint64), ("processes", ctypes.c_uint64))


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 where there is none."""
    try:
        return syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    except OSError:
        return 0


def restrict_paths() -> None:
    """Permanently give up every right that this kernel knows. Needs no_new_privs. Raises OSError."""
    rights = {field: _rights(field) for field, _ in _Ruleset._fields_}
    ruleset = _create(**rights)
    try:
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _rights(field: str) -> int:
    """All bits that the kernel accepts in a field, including rights newer than this module."""
    rights = 0
    while True:
        more = rights << 1 | 1
        try:
            os.close(_create(**{field: more}))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.E2BIG):
                raise
            return rights
        rights = more


def _create(**rights: int) -> int:
    """The descriptor of a new ruleset that forbids all use of these rights."""
    ruleset = _Ruleset(**rights)
    return syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(ctypes.sizeof(ruleset)), 0)


# A filter of system calls (seccomp): it allows the calls that training needs and refuses any other.
#
# The list has the calls that ONNX Runtime and ExecuTorch make once their graphs are loaded, and those that the C
# library may make instead, as strace and qemu show them. None reaches a file, another process or an address.

ALLOWED: dict[str, tuple[int, int]] = {  # numbers on x86-64, and on 64-bit ARM
    "brk": (12, 214),
    "clock_gettime": (228, 113),
    "close": (3, 57),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getrandom": (318, 278),
    "madvise": (28, 233),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "restart_syscall": (219, 128),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "sendto": (44, 206),
}
# The columns, the names of their processors in a filter (<linux/audit.h>), and their numbers of seccomp(2).
COLUMNS = {"x86_64": 0, "aarch64": 1}
PROCESSORS = (0xC000003E, 0xC00000B7)
SECCOMP = (317, 277)
# <linux/seccomp.h>
_SET_FILTER, _ALL_THREADS = 1, 1
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000
# The data of a call that a filter sees (struct seccomp_data), and its instructions (<linux/bpf_common.h>).
_NUMBER, _PROCESSOR = 0, 4
_LOAD, _COMPARE, _RETURN = 0x20, 0x15, 0x06
_LINE = struct.Struct("HBBI")  # instruction, lines to skip if equal, lines to skip if not, and a value


def seccomp_offered() -> bool:
    """Whether there is a filter for this processor, and the kernel accepts filters."""
    column = _column()
    try:
        return column is not None and bool(_set(column, None))
    except OSError as error:
        return error.errno == errno.EFAULT  # it tried to read the filter


def restrict_calls() -> None:
    """Permanently refuse every call that is not on the list, in all threads.

    Only if `seccomp_offered`, and after no_new_privs. Raises OSError.
    """
    column = COLUMNS[os.uname().machine]
    code = program(column)
    buffer = ctypes.create_string_buffer(code)
    if _set(column, struct.pack("HP", len(code) // _LINE.size, ctypes.addressof(buffer))):
        raise OSError(errno.EBUSY, "a thread keeps a filter of its own")


def program(column: int) -> bytes:
    """The filter as a program. A call for another architecture kills the process; x32 calls are not listed."""
    numbers = [row[column] for row in ALLOWED.values()]
    lines = [
        (_LOAD, 0, 0, _PROCESSOR),
        (_COMPARE, 1, 0, PROCESSORS[column]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *(line for number in numbers for line in ((_COMPARE, 0, 1, number), (_RETURN, 0, 0, _ALLOW))),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(_LINE.pack(*line) for line in lines)


def _column() -> int | None:
    """The column of this process; None for one of 32 bits, which has other calls."""
    return COLUMNS.get(os.uname().machine) if sys.maxsize > 2**32 else None


def _set(column: int, code: bytes | None) -> int:
    return syscall(SECCOMP[column], _SET_FILTER, _ALL_THREADS, code)
