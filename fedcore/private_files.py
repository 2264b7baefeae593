"""Private files: keys, written whole and durably, for their owner alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_private(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a file that only its owner may read. After a power cut it is there whole, or as it was before.

    Raises OSError, which names `path`; FileExistsError unless `replace`.
    """
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".partial")
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(handle)
            (os.replace if replace else os.link)(partial, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
