"""Files that are written atomically and durably, private ones too, and an orderly end on SIGTERM."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from fedcore.errors import NotWritten

PARTIAL = ".partial"
"""The suffix of files that are not whole yet."""


def write_private(path: Path, data: bytes, *, replace: bool = False, durable: bool = True) -> None:
    """Write a file that only its owner may read. After a kill it is complete or unchanged; if `durable`, after a power
    cut too.

    Raises NotWritten; FileExistsError unless `replace`.
    """
    _write(path, data, os.replace if replace else os.link, 0o600, durable=durable)


def write_whole(path: Path, data: bytes) -> None:
    """Write or replace a file that others may read, if the umask allows. As durable as `write_private`.

    Raises NotWritten.
    """
    umask = os.umask(0)
    os.umask(umask)
    _write(path, data, os.replace, 0o666 & ~umask)


def _write(path: Path, data: bytes, put: Callable[[str, Path], None], mode: int, *, durable: bool = True) -> None:
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=PARTIAL)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(handle, mode)
                if durable:
                    os.fsync(handle)
            put(partial, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
        if durable:
            sync_folder(path.parent)
    except FileExistsError as error:
        raise FileExistsError(error.errno, error.strerror, str(path)) from error
    except OSError as error:
        raise NotWritten(error.errno, error.strerror, str(path)) from error


def new_private(path: Path) -> BinaryIO:
    """A new, empty file, open for writing, that only its owner may read, whatever the umask. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchmod(handle, 0o600)
    return open(handle, "wb")


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter, whatever the umask, and its missing parents.

    An existing folder stays unchanged. Raises OSError.
    """
    if not folder.is_dir():
        make_private_folder(folder.parent)
        with contextlib.suppress(FileExistsError):  # another process was first
            folder.mkdir(0o700)
            folder.chmod(0o700)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_AGAIN_S = 0.01


def exit_on_sigterm(code: int, unless: Callable[[], bool] = lambda: False) -> None:
    """Have SIGTERM end this process with `code`, as `sys.exit` does. Call this in the main thread.

    unless: called when the signal comes; if it returns true, nothing happens.

    Python drops an exception that is raised within a destructor or a callback of a weak reference, and every import has
    such callbacks. So a signal that comes during one is handled after it.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        if unless():
            return
        if _in_destructor(frame):
            come_again()
            return
        sys.unraisablehook = functools.partial(dropped, sys.unraisablehook)
        sys.exit(code)

    def dropped(tell: Callable[[sys.UnraisableHookArgs], object], what: sys.UnraisableHookArgs) -> None:
        if isinstance(what.exc_value, SystemExit):
            come_again()
        else:
            tell(what)

    def come_again() -> None:
        signal.signal(signal.SIGALRM, terminate)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    signal.signal(signal.SIGTERM, terminate)


def _in_destructor(frame: FrameType | None) -> bool:
    """Whether a destructor is running. It is not cut short: it would not release what it holds."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
