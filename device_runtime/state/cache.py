"""The cache of blobs by digest: plans and graphs kept between rounds, and the first part of a broken download.

It keeps the last checkpoint of a plan: a newer one may come as a delta to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from device_runtime.errors import StateError
from device_runtime.state.folder import sweep_partials, write_whole
from fedcore.errors import DeltaError, DigestMismatch
from fedcore.plan import BlobRef

BLOBS = "blobs"
"""The folder of the cache, in the state folder."""
AHEAD_NS = 60 * 10**9
"""How far a file's time may be ahead of the clock, as on a file server."""
DOWNLOAD, LAST = ".download", ".last"
DIGEST = re.compile("[0-9a-f]{64}")


class PartialDownload:
    """The first bytes of a blob, in a file. Every method raises StateError when the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _usable(path):
            self.size = path.stat().st_size if path.exists() else 0

    def append(self, chunk: bytes) -> None:
        """Add what arrived."""
        with _usable(self._path), open(self._path, "ab", opener=_private) as file:
            file.write(chunk)
        self.size += len(chunk)

    def check(self, ref: BlobRef) -> None:
        """Check that all of a blob has arrived. Raises DigestMismatch, and nothing has arrived then."""
        with _usable(self._path):
            self._path.touch()  # a blob may be empty
            try:
                ref.check_file(self._path)
            except DigestMismatch:
                self.clear()
                raise

    def move(self, to: Path) -> None:
        """Give what arrived its place."""
        with _usable(self._path):
            self._path.replace(to)

    def clear(self) -> None:
        """Start again from nothing."""
        with _usable(self._path):
            self._path.unlink(missing_ok=True)
        self.size = 0


class BlobCache:
    """Blobs in a folder, each in a file named by its digest. Only for the holder of the state folder.

    `fetch` fetches a blob into the PartialDownload, and checks it; if it fails, that keeps what has arrived, over
    sessions. Only the last broken download is remembered, because a device that went on to other work has no use for
    older ones. `fetch_delta` gives the delta from a kept blob, by digest, to another, or None. keep: digests of blobs
    that models need, which stay, and so does what has arrived of them.
    """

    def __init__(
        self,
        folder: Path,
        fetch: Callable[[BlobRef, PartialDownload], None],
        fetch_delta: Callable[[BlobRef, str], bytes | None] = lambda ref, base: None,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._fetch, self._fetch_delta = fetch, fetch_delta
        sweep_partials(folder)

    def holds(self, ref: BlobRef) -> bool:
        """Whether a file with the blob's name is here; its content is not checked."""
        return (self._folder / ref.sha256).is_file()

    def counted(self, refs: Iterable[BlobRef]) -> int:
        """Bytes of these blobs, here or not, without those that models need: those stay whatever else is kept."""
        return sum(ref.size for ref in set(refs) if ref.sha256 not in self._keep)

    def get(self, ref: BlobRef) -> bytes:
        """The bytes of a blob. Raises as `file`."""
        read: list[bytes] = []
        path = self._checked(ref, lambda path: read.append(ref.check(path.read_bytes())))
        with _usable(path):
            return read[0] if read else path.read_bytes()

    def file(self, ref: BlobRef) -> Path:
        """The file of a blob, checked, and fetched if it is missing or damaged. Raises StateError, and as `fetch`."""
        return self._checked(ref, ref.check_file)

    def _checked(self, ref: BlobRef, check: Callable[[Path], None]) -> Path:
        path = self._folder / ref.sha256
        try:
            check(path)
            os.utime(path)
        except (FileNotFoundError, DigestMismatch):
            self._download(ref).move(path)
        except (OSError, ValueError) as error:
            raise StateError("a cached blob cannot be read", f"{path}: {error}") from error
        return path

    def settle(self, digests: Iterable[str]) -> None:
        """Make kept blobs survive a power cut. Raises StateError."""
        try:
            for path in (*(self._folder / digest for digest in digests), self._folder):
                opened = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(opened)
                finally:
                    os.close(opened)
        except OSError as error:
            raise StateError("a cached blob cannot be kept", str(error)) from error

    def newest(self, ref: BlobRef, series: str) -> bytes:
        """A blob that replaces the last one of its series, such as the checkpoints of a plan.

        It is made from that one and a delta, if both are available. Raises StateError, and as `fetch` and
        `fetch_delta`.
        """
        last = self._folder / f"{series}{LAST}"
        before = self._folder / _digest_in(last)
        if before.name == ref.sha256 or not before.is_file():
            data = self.get(ref)
        else:
            data = self._moved(before, ref) or self.get(ref)
            if before.name not in self._keep:
                with contextlib.suppress(OSError):
                    before.unlink()
        write_whole(last, ref.sha256.encode(), durable=False)
        return data

    def _moved(self, before: Path, ref: BlobRef) -> bytes | None:
        """A blob made from the kept one `before` and a delta; None if there is no delta or one of them is damaged."""
        delta = self._fetch_delta(ref, before.name)
        if delta is None:
            return None
        from fedcore.checkpoint import applied  # rarely needed

        try:
            data = applied(delta, before.read_bytes(), ref)
        except (DeltaError, OSError):
            return None
        write_whole(self._folder / ref.sha256, data, durable=False)
        return data

    def _download(self, ref: BlobRef) -> PartialDownload:
        path = self._folder / f"{ref.sha256}{DOWNLOAD}"
        with _usable(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            for other in self._folder.glob(f"*{DOWNLOAD}"):
                if other != path and other.stem not in self._keep:
                    other.unlink()
        partial = PartialDownload(path)
        self._fetch(ref, partial)
        return partial


def _digest_in(path: Path) -> str:
    """The digest in a file; for a missing or damaged file, a name that no blob has."""
    with contextlib.suppress(OSError, ValueError):
        digest = path.read_text("ascii")
        if DIGEST.fullmatch(digest):
            return digest
    return "none"


def trim(folder: Path, most: int, keep: frozenset[str] = frozenset()) -> None:
    """Remove kept blobs, the longest unused first, until they have at most `most` bytes; ignore failures.

    keep: digests of blobs that models need: they stay, and do not count. A partial download stays too. Only for the
    holder of the state folder.
    """
    now_ns = time.time_ns() + AHEAD_NS

    def used_ns(path: Path) -> int:
        used = path.stat().st_mtime_ns
        return used if used <= now_ns else 0  # by a clock that was ahead: nobody knows when

    files = [path for path in folder.glob("*") if not path.suffix and path.name not in keep and path.is_file()]
    total = 0
    for path in sorted(files, key=used_ns, reverse=True):
        total += path.stat().st_size
        if total > most:
            with contextlib.suppress(OSError):
                path.unlink()
    for path in folder.glob(f"*{LAST}"):
        if not (folder / _digest_in(path)).is_file():
            with contextlib.suppress(OSError):
                path.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise StateError("a download cannot be kept in the state folder", f"{path}: {error}") from error
