"""Immutable bytes, each named by the SHA-256 of what it holds: in a local folder, or in an object store.

An object store is named by its address: `s3://BUCKET/PREFIX`, `gs://…`, `az://…`, or `memory:///`, which ends with the
process. Credentials, regions and endpoints are those of the usual environment (AWS_…, GOOGLE_…, AZURE_…).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from coordinator.errors import MissingStore, Unavailable, UnknownBlob, UnsupportedBlobs
from coordinator.failpoints import reach
from fedcore.plan import BlobRef

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 18


class StoredName(NamedTuple):
    """A stored object, and when it was written, in seconds since 1970."""

    name: str
    written_at: float


class Blobs:
    """Content-addressed bytes at `address`, a folder or the URL of an object store.

    Writing is idempotent and survives a power cut once `put` has returned. An object store that does not answer is
    Unavailable. A folder is made if it is not there and
    `create`; else raises MissingStore. Raises UnsupportedBlobs when a URL cannot be used.
    """

    def __init__(self, address: str | Path, *, create: bool = True) -> None:
        self._write: Callable[[str, bytes], object]
        self._store: ObjectStore
        if "://" in str(address):
            self._store = _object_store(str(address))
            self._write = self._upload
            return
        folder = Path(address).absolute()
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise MissingStore(f"there is no blob folder {folder}; start the coordinator first, or name its folder")
        self._store = LocalStore(folder)
        self._write = lambda name, data: _write_durably(folder, name, data)

    def put(self, data: bytes) -> BlobRef:
        """Store `data`. The name appears only when the bytes are durable: a blob is whole or absent."""
        ref = BlobRef.of(data)
        if not self.has(ref.sha256):
            reach("blob.before-write")
            self._write(ref.sha256, data)
            reach("blob.after-write")
        return ref

    def has(self, sha256: str) -> bool:
        """Whether a blob is there. Raises UnknownBlob for what is no digest."""
        name = _checked(sha256)
        with suppress(UnknownBlob), _reaching(sha256):
            return bool(obstore.head(self._store, name))
        return False

    def get(self, sha256: str) -> bytes:
        """A blob's bytes. Raises UnknownBlob; fedcore.errors.DigestMismatch when they were altered."""
        with _reaching(sha256):
            data = bytes(obstore.get(self._store, _checked(sha256)).bytes())
        return BlobRef(sha256, len(data)).check(data)

    def read(self, sha256: str, part: range) -> Iterator[bytes]:
        """Some of a blob's bytes, in pieces and unchecked: who gets them checks the whole. Raises UnknownBlob."""
        if not part:
            return iter(())
        with _reaching(sha256):
            found = obstore.get(self._store, _checked(sha256), options={"range": (part.start, part.stop)})
        return (bytes(piece) for piece in found.stream(_CHUNK))

    def stored(self) -> Iterator[StoredName]:
        """Everything that is stored, what a killed write left included."""
        for page in obstore.list(self._store):
            yield from (StoredName(one["path"], one["last_modified"].timestamp()) for one in page)

    def delete(self, names: Sequence[str]) -> None:
        """Delete what `stored` named; what is gone already is no error. Only for whoever knows that no row needs it."""
        for name in names:
            with suppress(FileNotFoundError):
                obstore.delete(self._store, name)

    def _upload(self, name: str, data: bytes) -> None:
        with _reaching(name):
            obstore.put(self._store, name, data)


def _object_store(url: str) -> ObjectStore:
    try:
        return from_url(url)
    except (BaseError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedBlobs(f"blobs cannot be kept at {url!r}: {reason}") from error


def _checked(sha256: str) -> str:
    """The name of a blob: nothing but 64 hex digits, so that no name leads anywhere else. Raises UnknownBlob."""
    if not _DIGEST.fullmatch(sha256):
        raise UnknownBlob("a blob is named by the 64 lower-case hex digits of its SHA-256")
    return sha256


@contextmanager
def _reaching(sha256: str) -> Iterator[None]:
    """Raises UnknownBlob when there is none, Unavailable when an object store does not answer."""
    try:
        yield
    except FileNotFoundError:
        raise UnknownBlob(f"there is no blob {sha256[:12]}…") from None
    except BaseError as error:
        raise Unavailable("the blobs cannot be reached now; come back later") from error


def _write_durably(folder: Path, name: str, data: bytes) -> None:
    # By hand: an object store's put to a local folder does not wait for the disk.
    temporary = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        reach("blob.before-name")
        temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    # The name itself is only durable once the folder is; a database row may point at the blob from here on.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
