"""Sealing of stored data: AES-256-GCM under a key from the platform's keystore, or else from a file."""

from __future__ import annotations

import contextlib
import os
from functools import cached_property
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from device_runtime.errors import KeyUnavailable, SealBroken
from fedcore.private_files import write_private

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
