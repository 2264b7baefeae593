"""Keys, signatures, boxes and credentials; Merkle trees, and the neighbour graph that their roots decide."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from secagg.encoding import Reader
from secagg.errors import BadCiphertext, BadPoint, BadSignature, ExpiredCredential
from secagg.masking import stream
from secagg.parameters import GraphParameters

FIELD_PRIME = 2**255 - 19
NO_CONTEXT = bytes(32)
NONCE = bytes(12)  # every key seals one box
KEY_BYTES = 32


def tag(what: str) -> bytes:
    """The domain of a hash, key or signature, so that none can be used as another."""
    return b"muster.secagg.v1." + what.encode() + b"\0"


def u32(*values: int) -> bytes:
    """Values as unsigned 32-bit little-endian integers, joined."""
    return b"".join(value.to_bytes(4, "little") for value in values)


def sign(key: Ed25519PrivateKey, what: str, context: bytes, body: bytes) -> bytes:
    """A signature (64 bytes) over a domain, a context (32 bytes) and a body."""
    return key.sign(tag(what) + context + body)


def verify(signer: bytes, signature: bytes, what: str, context: bytes, body: bytes) -> None:
    """Raise BadSignature unless `signature` is the signer's (a 32-byte public key) over exactly these values."""
    try:
        Ed25519PublicKey.from_public_bytes(signer).verify(signature, tag(what) + context + body)
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(
            f"the {what} signature is not that of {signer.hex()[:12]}…: it was altered, or made for another session"
        ) from error


class PairKey:
    """An X25519 private key of one session, which agrees on keys with peers."""

    def __init__(self, private: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(private)

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    @property
    def secret(self) -> int:
        """The private scalar, clamped as RFC 7748 says: an integer below 2^255, which is secret-shared."""
        return clamp(int.from_bytes(self._key.private_bytes_raw(), "little"))

    def agree(self, peer: bytes) -> bytes:
        """The shared secret with a peer's public key, 32 bytes. Raises BadPoint."""
        check_encoding(peer)
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(peer))
        except ValueError as error:
            raise BadPoint(f"public key {peer.hex()[:12]}… has low order: its sender wants a known secret") from error


def clamp(scalar: int) -> int:
    """A scalar with the bits set and cleared that RFC 7748 §5 fixes."""
    return scalar & ((1 << 254) - 8) | 1 << 254


def check_encoding(point: bytes) -> None:
    """Raise BadPoint when a public key is not the one encoding of its point."""
    if int.from_bytes(point, "little") >= FIELD_PRIME:
        raise BadPoint(f"public key {point.hex()[:12]}… is not reduced: it would have two encodings")


def check_point(point: bytes) -> None:
    """Raise BadPoint unless a public key has the one valid encoding and is not of low order."""
    PairKey(bytes(32)).agree(point)


def derive(secret: bytes, sid: bytes, what: str, *numbers: int) -> bytes:
    """A key of 32 bytes for one purpose between numbered parties in one session."""
    return HKDF(SHA256(), 32, sid, tag(what) + u32(*numbers)).derive(secret)


def seal(key: bytes, shares: bytes, sid: bytes, sender: int, receiver: int) -> bytes:
    """Shares in a box that names sender and receiver. A key must seal only one box."""
    return AESGCM(key).encrypt(NONCE, shares, sid + u32(sender, receiver))


def open_box(key: bytes, box: bytes, sid: bytes, sender: int, receiver: int) -> bytes:
    """The content of a box. Raises BadCiphertext, which names the sender."""
    try:
        return AESGCM(key).decrypt(NONCE, box, sid + u32(sender, receiver))
    except InvalidTag as error:
        raise BadCiphertext(
            f"the box from position {sender} does not open: it was altered, or sealed for another", [sender]
        ) from error


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
    return replace(unsigned, signature=sign(authority, "credential", NO_CONTEXT, unsigned.body(id_))).encode()


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
    verify(authority, decoded.signature, "credential", NO_CONTEXT, decoded.body(id_))
    return decoded


def prove_possession(key: Ed25519PrivateKey, about: bytes, created: int) -> bytes:
    """A signature (64 bytes) that proves to the authority that a device holds its key for secure aggregation.

    about: the digest, 32 bytes, of the key that signs the request; created: when that was signed.
    """
    return sign(key, "possession", about, created.to_bytes(8, "little"))


def check_possession(id_: bytes, proof: bytes, about: bytes, created: int) -> None:
    """Raise BadSignature unless the key's holder made the proof for exactly that request."""
    verify(id_, proof, "possession", about, created.to_bytes(8, "little"))


# Merkle trees, and the neighbour graph that their roots decide. Spec: docs/spec/secagg.md §3.


EMPTY = bytes(32)


def sha256(data: bytes) -> bytes:
    """H of the specification."""
    return hashlib.sha256(data).digest()


def depth(n: int) -> int:
    """Number of siblings in a path, for n leaves."""
    return (n - 1).bit_length()


class Tree:
    """All levels of the tree over at least one leaf."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._levels = _levels([hash_of(leaf) for leaf in leaves])

    @property
    def root(self) -> bytes:
        """The hash that commits to all leaves and their order."""
        return self._levels[-1][0]

    def path(self, position: int) -> bytes:
        """The siblings from the leaf at `position` upwards, joined."""
        return b"".join(level[position >> height ^ 1] for height, level in enumerate(self._levels[:-1]))


def hash_of(leaf: bytes) -> bytes:
    """The hash of a leaf in the tree."""
    return sha256(b"\0" + leaf)


def root_of(hashes: Sequence[bytes]) -> bytes:
    """The root of the tree over leaves with these hashes, at least one."""
    return _levels(hashes)[-1][0]


def climb(leaf: bytes, position: int, path: bytes) -> bytes:
    """The root that follows from a leaf, its position and its path."""
    node = hash_of(leaf)
    for height in range(len(path) // 32):
        sibling = path[32 * height : 32 * height + 32]
        node = sha256(b"\1" + (sibling + node if position >> height & 1 else node + sibling))
    return node


def _levels(hashes: Sequence[bytes]) -> list[list[bytes]]:
    level = [*hashes, *[EMPTY] * ((1 << depth(len(hashes))) - len(hashes))]
    levels = [level]
    while len(level) > 1:
        level = [sha256(b"\1" + level[i] + level[i + 1]) for i in range(0, len(level), 2)]
        levels.append(level)
    return levels


class NeighbourGraph:
    """The neighbours of every position, by rank: the order in which they follow on the ring."""

    def __init__(self, parameters: GraphParameters, root: bytes, beacon: bytes) -> None:
        self._parameters = parameters
        words = stream(sha256(tag("graph") + root + beacon), parameters.n)
        self._ring: NDArray[np.int64] = np.argsort(words, kind="stable")
        self._place = np.empty_like(self._ring)
        self._place[self._ring] = np.arange(parameters.n)

    def neighbours(self, position: int) -> list[int]:
        """The k neighbours of a position; the one at index x − 1 has rank x. The relation is symmetric."""
        n, k = self._parameters.n, self._parameters.k
        if self._parameters.complete:
            distances = np.arange(1, n)
        else:
            distances = np.concatenate([np.arange(1, k // 2 + 1), np.arange(n - k // 2, n)])
        positions: list[int] = self._ring[(self._place[position] + distances) % n].tolist()
        return positions
