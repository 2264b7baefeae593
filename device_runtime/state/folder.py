"""The state folder of a device: one session at a time, and files that are either complete or absent."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from device_runtime.errors import StateError, StateInUse
from fedcore.private_files import PARTIAL, write_private


@contextlib.contextmanager
def only_session(folder: Path) -> Iterator[None]:
    """Hold the state folder, which is created if missing, for the length of a session.

    The lock ends with its process in any case. Raises StateInUse when another process holds it, StateError when the
    folder cannot be used.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateError("the state folder cannot be used", f"{folder}: {error}") from error
    try:
        _lock(lock, folder)
        yield
    finally:
        os.close(lock)


def is_held(folder: Path) -> bool:
    """Whether a session of any process holds the state folder now. Raises StateError when that cannot be determined."""
    try:
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError) as error:
        return isinstance(error, BlockingIOError)
    except OSError as error:
        raise StateError("the state folder's lock cannot be looked at", f"{folder}: {error}") from error
    return False


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file atomically. Raises StateError.

    durable: also after a power cut; not needed for data that is checked on every read and can be fetched again.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, data, replace=True, durable=durable)
    except OSError as error:
        raise StateError("a file of the state folder cannot be written", str(error)) from error


def sweep_partials(folder: Path) -> None:
    """Remove files that a killed process left half written, if possible. Only for the holder of the state folder."""
    for path in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):
            path.unlink()


def _lock(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StateInUse(
            f"another session is using state folder {folder}; give each device a folder of its own"
        ) from error
    except OSError as error:
        raise StateError("the state folder cannot be locked", f"{folder}: {error}") from error
