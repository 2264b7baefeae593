"""Sealed blobs: models of private rounds, unreadable until the transaction that counts them is committed.

The bytes are stored under another name, encrypted with a key that is only in memory until that transaction writes it.
After it they are stored in plain by the process that committed or, if that died, by the first one that asks for them.
Spec: docs/spec/privacy.md §3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coordinator.errors import Unavailable, UnknownBlob
from coordinator.rules.entities import SealedBlob
from coordinator.store.blobs import Blobs
from coordinator.store.database import Database
from fedcore.errors import FedcoreError
from fedcore.plan import BlobRef

_LOG = logging.getLogger(__name__)
_PURPOSE = b"muster: models of private rounds"
_KEY_BYTES, _TAG_BYTES = 32, 16
_NONCE = bytes(12)  # every key seals one blob
_BATCH = 100
"""Sealed blobs that are let go of in one transaction: other writers wait for its end."""


class SealedBlobs:
    """The sealed ones among `blobs`, whose rows are in `database`."""

    def __init__(self, database: Database, blobs: Blobs) -> None:
        self._database, self._blobs = database, blobs
        blobs.opens = self.open

    def put(self, secret: bytes, data: bytes) -> SealedBlob:
        """Store `data` sealed: under the same secret the same bytes, so that a commit may be tried again."""
        ref = BlobRef.of(data)
        key = HKDF(SHA256(), _KEY_BYTES, salt=bytes.fromhex(ref.sha256), info=_PURPOSE).derive(secret)
        cipher = Cipher(AES256(key), GCM(_NONCE)).encryptor()  # and not AESGCM, which takes no more than 2 GiB
        return SealedBlob(ref, self._blobs.put(b"".join((cipher.update(data), cipher.finalize(), cipher.tag))), key)

    def open(self, sha256: str) -> bool:
        """Store a blob in plain if a row says that it is sealed; whether it is there now.

        Raises Unavailable when it cannot be stored.
        """
        with self._database.reading() as records:
            blob = records.sealed.find(sha256)
        if blob is None:
            return False
        try:
            data = self._blobs.get(blob.sealed.sha256)
            cipher = Cipher(AES256(blob.key), GCM(_NONCE, data[-_TAG_BYTES:])).decryptor()
            self._blobs.put(blob.ref.check(cipher.update(data[:-_TAG_BYTES]) + cipher.finalize()))
        except (UnknownBlob, FedcoreError) as error:
            _LOG.error("blob %s… cannot be opened: %s", sha256[:12], error)
            return False
        except OSError as error:
            _LOG.error("blob %s… cannot be stored in plain: %s", sha256[:12], error)
            raise Unavailable("a model cannot be stored now; come back later") from error
        return True

    def settle(self, stopped: Callable[[], bool]) -> None:
        """Store in plain what is not yet, and let go of its sealed form; what cannot be stored now stays.

        When `stopped` answers true it ends soon.
        """
        with self._database.reading() as records:
            pending = records.sealed.names()
        while pending and not stopped():
            batch, pending = pending[:_BATCH], pending[_BATCH:]
            opened = [name for name in batch if self._in_plain(name)]
            with self._database.writing() as records:
                records.sealed.forget(opened)

    def _in_plain(self, name: str) -> bool:
        with suppress(Unavailable):
            return self._blobs.has(name)
        return False
