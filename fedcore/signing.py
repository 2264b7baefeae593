"""Ed25519 signatures of plans, releases and certificates, which show their origin.

Spec: docs/spec/plan.md §8, §9; docs/spec/privacy.md.

The engine works without `cryptography`: no module of `fedcore` that it needs imports this one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedcore.errors import BadSignature, InvalidKey
from fedcore.model_release import ModelRelease, decode_model_release
from fedcore.plan import BlobRef, PlanSignature
from fedcore.privacy.certificate import PrivacyCertificate, decode_certificate
from fedcore.private_files import write_private
from fedcore.release import LineageEntry, Release, Signed, TreeHead, decode_entry, decode_head, decode_release

DOMAIN = b"muster.plan.v1\0"
"""The prefix of signed plans."""
KIND = "ed25519:"
T = TypeVar("T", bound=msgspec.Struct)


def message(plan: BlobRef) -> bytes:
    """The message to sign: a prefix that excludes other protocols' signatures, and the plan's digest."""
    return DOMAIN + bytes.fromhex(plan.sha256)


def verify(plan: BlobRef, signature: PlanSignature) -> None:
    """Raise BadSignature unless its signer made `signature` over this plan. Does not check that the signer is trusted.

    Raises InvalidKey when the signer is not a public key.
    """
    if not _fits(signature.signer, signature.value, message(plan)):
        raise BadSignature(
            f"plan {plan.sha256[:12]}… does not have the signature of {signature.signer}: it was altered, or signed "
            "for another plan; sign it again with `muster plan sign`"
        )


_KINDS: Mapping[type[msgspec.Struct], tuple[bytes, str, Callable[[str], Any]]] = {
    Release: (b"muster.release.v1\0", "release", decode_release),
    ModelRelease: (b"muster.model.v1\0", "model release", decode_model_release),
    LineageEntry: (b"muster.lineage.v1\0", "lineage entry", decode_entry),
    TreeHead: (b"muster.log.v1\0", "head of the log", decode_head),
    PrivacyCertificate: (b"muster.privacy.v1\0", "privacy certificate", decode_certificate),
}
"""Statements: the prefix of signed text, so that no signature is valid for another purpose, a name and a decoder."""


def verified(signed: Signed, kind: type[T]) -> T:
    """The statement of this kind, if its signer signed it. This does not check that the signer is trusted.

    kind: Release, ModelRelease, LineageEntry, TreeHead or PrivacyCertificate. Raises BadSignature, InvalidKey, and for
    a malformed statement BadRelease, or PrivacyError.
    """
    domain, noun, decode = _KINDS[kind]
    if not _fits(signed.signer, signed.value, domain + signed.text.encode()):
        raise BadSignature(f"the {noun} does not have the signature of {signed.signer}: it was altered")
    statement: T = decode(signed.text)
    return statement


def _fits(signer: str, value: str, data: bytes) -> bool:
    key = public_key(signer)
    try:
        key.verify(from_base64url(value), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_key(signer: str) -> Ed25519PublicKey:
    """The key in its text form, `ed25519:` and 32 bytes in base64url. Raises InvalidKey."""
    if signer.startswith(KIND):
        with contextlib.suppress(ValueError):
            return Ed25519PublicKey.from_public_bytes(from_base64url(signer.removeprefix(KIND)))
    raise InvalidKey(f"{signer!r} is not a public key: it must be {KIND} and 32 bytes in base64url, without padding")


def key_text(public: bytes) -> str:
    """A public key of 32 bytes in its text form."""
    return KIND + base64url(public)


class SigningKey:
    """A private key that signs plans, releases or the checkpoints of a lineage. Its file is all that signing needs."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def new(cls, path: Path) -> SigningKey:
        """Make a key and write it to `path` as PKCS #8 in PEM, durably and readable only by its owner.

        Raises OSError; FileExistsError instead of replacing a file.
        """
        key = Ed25519PrivateKey.generate()
        write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return cls(key)

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """The key in a file. Raises OSError; InvalidKey for no file, or one without an Ed25519 key in plain PEM."""
        if not path.exists():
            raise InvalidKey(f"there is no file {path}; `muster key new --out {path}` makes a key")
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidKey(f"{path} is not a private key in plain PEM; `muster key new` makes one") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidKey(f"{path} holds a {type(key).__name__}, not an Ed25519 key; `muster key new` makes one")
        return cls(key)

    @property
    def signer(self) -> str:
        """The public key in its text form."""
        return key_text(self._key.public_key().public_bytes_raw())

    def sign(self, plan: BlobRef) -> PlanSignature:
        """Sign a plan by its digest. The same key and plan give the same signature."""
        return PlanSignature(self.signer, self._signature(message(plan)))

    def sign_statement(self, statement: msgspec.Struct) -> Signed:
        """Sign a statement of one of the kinds that `verified` knows."""
        text = msgspec.json.encode(statement, order="sorted").decode()
        return Signed(text, self.signer, self._signature(_KINDS[type(statement)][0] + text.encode()))

    def secret(self, purpose: bytes) -> bytes:
        """32 secret bytes derived from the key: always the same for one purpose, different for each purpose."""
        return HKDF(SHA256(), 32, salt=None, info=purpose).derive(self._key.private_bytes_raw())

    def _signature(self, data: bytes) -> str:
        return base64url(self._key.sign(data))


def base64url(data: bytes) -> str:
    """Bytes in base64url without padding, as keys and signatures are written."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_base64url(text: str) -> bytes:
    """The inverse of `base64url`, and of nothing else: one value has one spelling. Raises ValueError."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    if base64url(data) != text:
        raise ValueError("not in its one spelling")
    return data
