"""Landlock: a process gives up paths, TCP ports, and other processes, as far as the kernel supports it.

<linux/landlock.h>. It does not cover the modes, owners, times and attributes of files, nor System V queues.
"""

from __future__ import annotations

import ctypes
import errno
import os

from device_runtime.sandbox.kernel import syscall

# From this version on (Linux 6.12) it covers all of its kinds: paths, TCP, signals, abstract sockets.
WHOLE = 6
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_ASK_VERSION = 1


class _Ruleset(ctypes.Structure):
    """The rights to give up, one bit each."""

    _fields_ = (("paths", ctypes.c_uint64), ("ports", ctypes.c_uint64), ("processes", ctypes.c_uint64))


def version() -> int:
    """The version of the kernel's Landlock; 0 where there is none."""
    try:
        return syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    except OSError:
        return 0


def restrict() -> None:
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
