"""Apple's App Attest: a statement in which a phone's hardware, and Apple, vouch for an app and its key.

Spec: docs/spec/wire.md §9. The checks, in Apple's order:
https://developer.apple.com/documentation/devicecheck/validating-apps-that-connect-to-your-server
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import cbor2
import msgspec
from cryptography import x509
from cryptography.hazmat import asn1
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from authority.certificates import UNREADABLE, Roots, extension_of
from authority.errors import BadAppleFile, NotAttested
from fedcore.decoding import converter

NONCE = x509.ObjectIdentifier("1.2.840.113635.100.8.2")
PRODUCTION, DEVELOPMENT = b"appattest".ljust(16, b"\0"), b"appattestdevelop"
_LONGEST = 3
"""A phone's certificate, Apple's intermediate one, and its root."""
_AUTHENTICATOR = struct.Struct(">32s B I 16s H 32s")
"""Of the authenticator data: the digest of the app's id, flags, counter, environment, and a key id with its length."""
_DEPTH = 3


class AppleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The phones that are accepted. Paths are relative to the file that names them.

    roots: certificates, PEM, at which every chain must end. app: the only accepted app, as TEAM.BUNDLE. development:
    whether builds that Xcode installed are accepted too.
    """

    roots: str
    app: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Z]{10}\..+$")]
    development: bool = False


class _Evidence(msgspec.Struct, frozen=True):
    x5c: Annotated[tuple[bytes, ...], msgspec.Meta(min_length=2, max_length=_LONGEST)]


class _Statement(msgspec.Struct, frozen=True, rename={"evidence": "attStmt", "authenticator": "authData"}):
    fmt: Literal["apple-appattest"]
    evidence: _Evidence
    authenticator: bytes


@asn1.sequence
class _Nonce:
    value: Annotated[bytes, asn1.Explicit(1)]


_SETTINGS, _STATEMENT = converter(AppleSettings), converter(_Statement)


@dataclass(frozen=True)
class ApplePhones:
    """The check of phones' evidence."""

    settings: AppleSettings
    roots: Roots

    @classmethod
    def load(cls, path: Path) -> ApplePhones:
        """The phones that a TOML file describes. Raises BadAppleFile, also for a file that it names."""
        try:
            settings = _SETTINGS(tomllib.loads(path.read_text("utf-8")))
            return cls(settings, Roots.load(path.parent / settings.roots, _LONGEST))
        except OSError as error:
            raise BadAppleFile(f"{path}, or a file that it names, cannot be read: {error}") from error
        except (msgspec.ValidationError, ValueError) as error:
            raise BadAppleFile(f"{path} does not say which phones are taken: {error}") from error

    def check(self, statement: bytes, challenge: bytes, now: int) -> None:
        """Raise NotAttested unless a statement (a CBOR attestation object) is of the accepted app and this challenge.

        challenge: the 32 bytes that the app gave as clientDataHash. now: seconds since 1970.
        """
        attestation = _decoded(statement)
        leaf = self.roots.verify(attestation.evidence.x5c, now)[0]
        if not hmac.compare_digest(_nonce(leaf), hashlib.sha256(attestation.authenticator + challenge).digest()):
            raise NotAttested("the challenge is not that of this key and this request")
        if len(attestation.authenticator) < _AUTHENTICATOR.size:
            raise NotAttested("the authenticator data end too early")
        app, _, counter, environment, length, key_id = _AUTHENTICATOR.unpack_from(attestation.authenticator)
        if (length, key_id) != (len(key_id), _key_id(leaf)):
            raise NotAttested("the certificate is for another key than the statement")
        if app != hashlib.sha256(self.settings.app.encode()).digest():
            raise NotAttested("the app that asked is not the one that is taken here")
        if counter != 0:
            raise NotAttested("the key was used before it was attested")
        if environment != PRODUCTION and not (self.settings.development and environment == DEVELOPMENT):
            raise NotAttested(f"the environment {environment!r} is not one that is taken here")


def _decoded(statement: bytes) -> _Statement:
    try:
        return _STATEMENT(
            cbor2.loads(
                statement,
                max_depth=_DEPTH,
                allow_indefinite=False,
                allow_duplicate_keys=False,
                strict_hashable_types=True,
                semantic_decoders=_NO_TAGS,
            )
        )
    except (cbor2.CBORDecodeError, msgspec.ValidationError) as error:
        raise NotAttested(f"the statement is no attestation object of App Attest: {error}") from error


def _refuse(value: object, immutable: bool) -> NoReturn:
    raise cbor2.CBORDecodeError("it has a tag, which such objects have not")


_NO_TAGS: dict[int, Any] = dict.fromkeys((*range(300), 1004, 43_000, 55_799), _refuse)
"""The tags that the library interprets: untrusted input must not make it build dates, patterns or huge numbers."""


def _nonce(leaf: x509.Certificate) -> bytes:
    try:
        return asn1.decode_der(_Nonce, extension_of(leaf, NONCE, "nonce of App Attest")).value
    except UNREADABLE as error:
        raise NotAttested(f"the nonce of the first certificate cannot be read: {error}") from error


def _key_id(leaf: x509.Certificate) -> bytes:
    """The id that App Attest gives to the key of a certificate: the digest of its point."""
    try:
        point = leaf.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    except UNREADABLE as error:
        raise NotAttested(f"the key of the first certificate is none of App Attest: {error}") from error
    return hashlib.sha256(point).digest()
