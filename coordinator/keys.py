"""The coordinator's own keys: one signs invitations to secure rounds, the other enrols devices.

All replicas have the same keys, from a file and never from the database, so that its copies do not hold them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coordinator.errors import KeysDamaged

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Keys:
    """The private keys of the server and of the enrolment authority."""

    server: Ed25519PrivateKey
    authority: Ed25519PrivateKey

    @classmethod
    def at(cls, path: Path) -> Keys:
        """The keys in a file, made when missing; only its owner may read it.

        When the file is lost, every device must enrol anew: devices pin the public keys. Raises KeysDamaged.
        """
        if not path.exists():
            _write(path, secrets.token_bytes(2 * _KEY_BYTES))
        data = path.read_bytes()
        if len(data) != 2 * _KEY_BYTES:
            raise KeysDamaged(f"{path} does not hold two keys of {_KEY_BYTES} bytes: put the right file in its place")
        return cls(*(Ed25519PrivateKey.from_private_bytes(data[at : at + _KEY_BYTES]) for at in (0, _KEY_BYTES)))

    @property
    def fingerprint(self) -> str:
        """A digest of the public keys, hex: replicas see by it that they have the same."""
        public = b"".join(key.public_key().public_bytes_raw() for key in (self.server, self.authority))
        return hashlib.sha256(public).hexdigest()

    @property
    def between_replicas(self) -> bytes:
        """A secret derived from the keys: it authenticates requests that replicas forward to each other."""
        derived = HKDF(SHA256(), _KEY_BYTES, salt=None, info=b"muster: requests passed on between replicas")
        return derived.derive(self.server.private_bytes_raw())


def _write(path: Path, data: bytes) -> None:
    """Write a private file, durably and whole, unless another process was first."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
