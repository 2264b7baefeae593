"""Credentials: the enrolment authority's statement, valid for a time, that a secure-aggregation key is a device's.

Spec: docs/spec/secagg.md §1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secagg import keys
from secagg.encoding import Reader
from secagg.errors import ExpiredCredential

DEVICE_BYTES, SIGNATURE_BYTES = 16, 64
CREDENTIAL_BYTES = DEVICE_BYTES + 8 + SIGNATURE_BYTES
NO_CREDENTIAL = bytes(CREDENTIAL_BYTES)


@dataclass(frozen=True, slots=True)
class Credential:
    """An authority's signature over a device's key, the device's id (16 bytes) and a time.

    expires: the last second, since 1970, at which it is valid.
    """

    device: bytes
    expires: int
    signature: bytes = bytes(SIGNATURE_BYTES)

    def encode(self) -> bytes:
        """The credential as M1 carries it."""
        return self.device + self.expires.to_bytes(8, "little") + self.signature

    @classmethod
    def decode(cls, data: bytes) -> Credential:
        """The inverse of `encode`. Raises Malformed."""
        with Reader(data, "the credential") as reader:
            return cls(reader.take(DEVICE_BYTES), reader.integer(8), reader.take(SIGNATURE_BYTES))

    def body(self, id_: bytes) -> bytes:
        """The bytes that are signed, for a device's key."""
        return id_ + self.device + self.expires.to_bytes(8, "little")


def issue(authority: Ed25519PrivateKey, id_: bytes, device: bytes, expires: int) -> bytes:
    """The credential of a device for its key `id_`. The authority has checked that the device holds the key."""
    unsigned = Credential(device, expires)
    return replace(unsigned, signature=keys.sign(authority, "credential", keys.NO_CONTEXT, unsigned.body(id_))).encode()


def check_credential(authority: bytes, id_: bytes, credential: bytes, until: int) -> Credential:
    """The credential, if the authority (a 32-byte public key) issued it for this key and it is valid until `until`.

    Raises Malformed, BadSignature or ExpiredCredential.
    """
    decoded = _check_signature(authority, id_, credential)
    if decoded.expires < until:
        raise ExpiredCredential(
            f"the credential of {id_.hex()[:12]}… ended at {decoded.expires}, and must be good until {until}"
        )
    return decoded


@lru_cache(maxsize=4096)
def _check_signature(authority: bytes, id_: bytes, credential: bytes) -> Credential:
    """The credential, if the authority signed it. Valid ones are cached, as the same devices meet in many rounds."""
    decoded = Credential.decode(credential)
    keys.verify(authority, decoded.signature, "credential", keys.NO_CONTEXT, decoded.body(id_))
    return decoded


def prove_possession(key: Ed25519PrivateKey, about: bytes, created: int) -> bytes:
    """A signature (64 bytes) that proves to the authority that a device holds its key for secure aggregation.

    about: the digest, 32 bytes, of the key that signs the request; created: when that was signed.
    """
    return keys.sign(key, "possession", about, created.to_bytes(8, "little"))


def check_possession(id_: bytes, proof: bytes, about: bytes, created: int) -> None:
    """Raise BadSignature unless the key's holder made the proof for exactly that request."""
    keys.verify(id_, proof, "possession", about, created.to_bytes(8, "little"))
