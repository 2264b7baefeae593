"""Files that are written atomically and durably: private ones, such as keys, and others."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
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
