"""Immutable bytes in a local folder, each file named by the SHA-256 of what it holds."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from coordinator.errors import MissingStore, UnknownBlob
from coordinator.failpoints import reach
from fedcore.plan import BlobRef

_DIGEST = re.compile(r"[0-9a-f]{64}")


class Blobs:
    """Content-addressed files. Writing is idempotent and survives a power cut once `put` has returned.

    The folder is made if it is not there and `create`; else raises MissingStore.
    """

    def __init__(self, folder: Path, *, create: bool = True) -> None:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise MissingStore(f"there is no blob folder {folder}; start the coordinator first, or name its folder")
        self._folder = folder

    def put(self, data: bytes) -> BlobRef:
        """Store `data`. The name appears only when the bytes are on disk: a blob is whole or absent."""
        ref = BlobRef.of(data)
        final = self.path(ref.sha256)
        if final.exists():
            return ref
        reach("blob.before-write")
        temporary = self._folder / f".{secrets.token_hex(8)}.tmp"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            reach("blob.before-name")
            temporary.replace(final)
        finally:
            temporary.unlink(missing_ok=True)
        self._sync_folder()
        reach("blob.after-write")
        return ref

    def get(self, sha256: str) -> bytes:
        """A blob's bytes. Raises UnknownBlob; fedcore.errors.DigestMismatch when the file was altered."""
        try:
            data = self.path(sha256).read_bytes()
        except FileNotFoundError as error:
            raise UnknownBlob(f"there is no blob {sha256[:12]}…") from error
        return BlobRef(sha256, len(data)).check(data)

    def path(self, sha256: str) -> Path:
        """Where a blob lies, or would. Raises UnknownBlob for anything but 64 hex digits: no name leaves the folder."""
        if not _DIGEST.fullmatch(sha256):
            raise UnknownBlob("a blob is named by the 64 lower-case hex digits of its SHA-256")
        return self._folder / sha256

    def _sync_folder(self) -> None:
        # The rename itself is only durable once the folder is; a database row may point at the file from here on.
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
