"""The state folder of a device: one session at a time, keys, sealed models, and the cache of blobs by digest."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from device_runtime.errors import KeyUnavailable, SealBroken, StateError, StateInUse
from fedcore.errors import DeltaError, DigestMismatch
from fedcore.plan import BlobRef
from fedcore.private_files import PARTIAL, sync_folder, write_private
from fedcore.release import Signed


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


KEY_BYTES, NONCE_BYTES = 32, 12
OVERHEAD_BYTES = NONCE_BYTES + 16
"""Bytes that sealing adds: the nonce before and the tag after."""


class KeyStore(Protocol):
    """The store of the sealing key. A host application implements it with the platform's own keystore."""

    def key(self) -> bytes:
        """32 random bytes, the same at every call. Raises KeyUnavailable while they are unavailable."""


class KeyFile:
    """A key in a file that only its owner may read, made on first use. For platforms without a keystore."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def key(self) -> bytes:
        """The key in the file."""
        try:
            with contextlib.suppress(FileNotFoundError):
                return self._path.read_bytes()
            self._make()
            return self._path.read_bytes()
        except OSError as error:
            raise KeyUnavailable("the file of the sealing key cannot be used", f"{self._path}: {error}") from error

    def _make(self) -> None:
        """Write the file atomically, unless another process was first."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            write_private(self._path, os.urandom(KEY_BYTES))


class Sealer:
    """Seals and opens bytes. Callers name the kind of data, so that sealed bytes cannot be used as another kind.

    Every method raises KeyUnavailable.
    """

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys

    def seal(self, what: str, data: bytes) -> bytes:
        """The data, encrypted and authenticated, and longer by OVERHEAD_BYTES."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, what.encode())

    def open(self, what: str, sealed: bytes) -> bytes:
        """The data. Raises SealBroken when it was changed, is of another kind, or was sealed under another key."""
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], what.encode())
        except (InvalidTag, ValueError) as error:
            raise SealBroken(f"the {what} was changed, or sealed under another key") from error

    @cached_property
    def _cipher(self) -> AESGCM:
        key = self._keys.key()
        if len(key) != KEY_BYTES:
            raise KeyUnavailable(f"the sealing key has {len(key)} bytes, not {KEY_BYTES}: put the right one back")
        return AESGCM(key)


SECRET_BYTES = 32


def device_key(folder: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key that signs this installation's requests, made at the first call.

    Only for the holder of the state folder. Raises StateError, or KeyUnavailable when the sealing key is unavailable or
    does not open the file; the file stays, since the right sealing key may come back.
    """
    return _kept(folder / "device-key", sealer)


def secagg_key(folder: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key of this installation for secure aggregation. As `device_key`."""
    return _kept(folder / "secagg-key", sealer)


def _kept(path: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key whose sealed bytes are in a file."""
    try:
        key_bytes = sealer.open(path.name, path.read_bytes())
    except FileNotFoundError:
        key_bytes = secrets.token_bytes(SECRET_BYTES)
        write_whole(path, sealer.seal(path.name, key_bytes))
    except OSError as error:
        raise StateError(f"the {path.name} file cannot be read", f"{path}: {error}") from error
    except SealBroken as error:
        raise KeyUnavailable(
            f"the {path.name} file does not open: put back the sealing key that it was sealed under, or remove the "
            "file, after which this is a new device",
            str(path),
        ) from error
    return Ed25519PrivateKey.from_private_bytes(key_bytes)


SUFFIX = ".personal"


class PersonalStore:
    """The personal parameters of one model of one population. Every method raises StateError."""

    def __init__(self, folder: Path, sealer: Sealer, population: str, name: str) -> None:
        named = hashlib.sha256(f"{population}\n{name}".encode()).hexdigest()
        self._path = folder / f"{named}{SUFFIX}"
        self._sealer = sealer

    def get(self, release: Signed) -> bytes | None:
        """The parameters that were made from this version, as a checkpoint; None without.

        None too where they belong to another version, or the file was changed. Raises KeyUnavailable.
        """
        try:
            return self._sealer.open(_what(release), self._path.read_bytes())
        except (FileNotFoundError, SealBroken):
            return None
        except OSError as error:
            raise StateError("personal parameters cannot be read", str(error)) from error

    def put(self, release: Signed, parameters: bytes) -> None:
        """Store the parameters that were made from a version, in the place of any. Raises KeyUnavailable."""
        self._delete(f"{self._path.name}.*{PARTIAL}")
        write_whole(self._path, self._sealer.seal(_what(release), parameters))

    def drop(self) -> bool:
        """Delete what is stored; whether there was anything. It stays deleted after a power cut."""
        stored = self._path.exists()
        self._delete(f"{self._path.name}*")  # and what a killed process left half written
        return stored

    def _delete(self, names: str) -> None:
        try:
            for path in self._path.parent.glob(names):
                path.unlink()
            sync_folder(self._path.parent)
        except OSError as error:
            raise StateError("personal parameters cannot be deleted", str(error)) from error


def _what(release: Signed) -> str:
    return f"personal parameters from model release {release.digest}"


# The cache of blobs by digest: plans and graphs kept between rounds, and the first part of a broken download.
#
# It keeps the last checkpoint of a plan: a newer one may come as a delta to it.


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
