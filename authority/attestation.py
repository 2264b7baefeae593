"""Attestation: evidence from a phone's hardware that a key belongs to a device, and not to any sender.

An authority checks it for every credential that it issues, a coordinator when a device enrols without one. Spec:
docs/spec/wire.md §9. A further kind is a message in `fedcore.wire.messages`, and a case here.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
import struct
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import cbor2
import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat import asn1
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store, VerificationError

from authority.errors import BadAndroidFile, BadAppleFile, BadSecret, NotAttested
from fedcore.validation import converter
from fedcore.wire import messages

UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    CryptographyDeprecationWarning,
    x509.DuplicateExtension,
    x509.InvalidVersion,
)
"""Errors of reading untrusted certificates; warnings, if they are errors."""


@dataclass(frozen=True)
class Roots:
    """The certificates at which chains must end. longest: the most certificates of a chain, including its root."""

    certificates: tuple[x509.Certificate, ...]
    longest: int

    @classmethod
    def load(cls, path: Path, longest: int) -> Roots:
        """The certificates of a PEM file. Raises OSError, or ValueError when there are none."""
        return cls(tuple(x509.load_pem_x509_certificates(path.read_bytes())), longest)

    def verify(self, chain: Sequence[bytes], now: int) -> list[x509.Certificate]:
        """The certificates of a chain (DER, leaf first), after checking signatures, dates and the right to sign.

        now: seconds since 1970. Raises NotAttested.
        """
        try:
            leaf, *others = map(x509.load_der_x509_certificate, chain)
            verifier = self._rules.time(dt.datetime.fromtimestamp(now, dt.UTC)).build_client_verifier()
            return verifier.verify(leaf, others).chain
        except VerificationError as error:
            raise NotAttested(f"the chain of certificates leads to no root that is known here: {error}") from error
        except UNREADABLE as error:
            raise NotAttested(f"the chain of certificates cannot be read: {error}") from error

    @cached_property
    def _rules(self) -> PolicyBuilder:
        may_sign = (
            ExtensionPolicy.permit_all()
            .require_present(x509.BasicConstraints, Criticality.AGNOSTIC, None)
            .require_present(x509.KeyUsage, Criticality.AGNOSTIC, _signs_certificates)
        )
        return (
            PolicyBuilder()
            .store(Store(list(self.certificates)))
            .max_chain_depth(self.longest - 2)
            .extension_policies(ca_policy=may_sign, ee_policy=ExtensionPolicy.permit_all())
        )


def extension_of(certificate: x509.Certificate, oid: x509.ObjectIdentifier, what: str) -> bytes:
    """An extension in DER. what: a description of it. Raises NotAttested when there is none."""
    try:
        return certificate.extensions.get_extension_for_oid(oid).value.public_bytes()
    except x509.ExtensionNotFound as error:
        raise NotAttested(f"the first certificate has no {what}") from error


def _text_of(challenge: bytes) -> bytes:
    """A challenge as what takes only texts is given it: 64 digits of hex, in lower case."""
    return challenge.hex().encode()


def _signs_certificates(_: Any, __: x509.Certificate, usage: x509.KeyUsage) -> None:
    if not usage.key_cert_sign:
        raise ValueError("a certificate of the chain may not sign others")


# Android Key Attestation: a certificate chain in which a phone's secure hardware describes its system and its app.
#
# Spec: docs/spec/wire.md §9. Layout of the extension:
# https://source.android.com/docs/security/features/keystore/attestation

KEY_DESCRIPTION = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.1.17")
TEE, STRONGBOX = b"\x01", b"\x02"
ENOUGH = {"tee": {TEE, STRONGBOX}, "strongbox": {STRONGBOX}}
"""Sufficient security levels, by the least one required. Software never suffices."""
ROOT_OF_TRUST, APPLICATION_ID = b"\xbf\x85\x40", b"\xbf\x85\x45"
"""Tags of an authorization list: [704] and [709], explicit."""
VERIFIED = b"\x00"

_NO_PLAY_INTEGRITY = (
    "is not taken: Google encrypts each verdict to the keys of one app, so there is no verdict with which a check "
    "could be tested, and an untested one may let in whom it should keep out. Leave it out: Android Key Attestation, "
    "which this file is about, tells of system and app without it"
)


class AndroidSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The phones that are accepted. Paths are relative to the file that names them.

    roots: certificates, PEM, at which every chain must end. package, signer: the name of the only accepted app, and the
    SHA-256 of the certificate that signs it, in hex. security_level: the least accepted. verified_boot: whether the
    boot loader must be locked and the system the maker's. revoked: a list of revoked serial numbers, in Google's
    format.
    """

    roots: str
    package: str
    signer: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
    security_level: Literal["tee", "strongbox"] = "tee"
    verified_boot: bool = True
    revoked: str | None = None


_SETTINGS = converter(AndroidSettings)


@dataclass(frozen=True)
class AndroidPhones:
    """The check of phones' evidence. revoked: serial numbers of revoked certificates."""

    settings: AndroidSettings
    roots: Roots
    revoked: frozenset[int] = frozenset()

    @classmethod
    def load(cls, path: Path) -> AndroidPhones:
        """The phones that a TOML file describes. Raises BadAndroidFile, also for a file that it names."""
        try:
            table = tomllib.loads(path.read_text("utf-8"))
            if "play_integrity" in table:
                raise BadAndroidFile(f"{path}: play_integrity {_NO_PLAY_INTEGRITY}")
            settings = _SETTINGS(table)
            roots = Roots.load(path.parent / settings.roots, messages.MOST_CERTIFICATES)
            listed = path.parent / settings.revoked if settings.revoked is not None else None
            return cls(settings, roots, frozenset() if listed is None else _serials(listed))
        except OSError as error:
            raise BadAndroidFile(f"{path}, or a file that it names, cannot be read: {error}") from error
        except (msgspec.ValidationError, ValueError) as error:
            raise BadAndroidFile(f"{path} does not say which phones are taken: {error}") from error

    def check(self, chain: Sequence[bytes], challenge: bytes, now: int) -> None:
        """Raise NotAttested unless a chain (DER, leaf first) is of an accepted phone and names this challenge.

        challenge: the 32 bytes that the leaf must name, or their digits. now: seconds since 1970.
        """
        verified = self.roots.verify(chain, now)
        for certificate in verified:
            if certificate.serial_number in self.revoked:
                raise NotAttested(f"the certificate with the serial number {certificate.serial_number:x} is revoked")
        try:
            # Otherwise a key that was attested for any app could vouch for a phone that does not exist.
            if any(
                extension.oid == KEY_DESCRIPTION for certificate in verified[1:] for extension in certificate.extensions
            ):
                raise NotAttested("a certificate that signs another is itself that of an attested key")
            description = extension_of(verified[0], KEY_DESCRIPTION, "description of a key")
            self._check_description(asn1.decode_der(_KeyDescription, description), challenge)
        except UNREADABLE as error:
            raise NotAttested(f"the chain of certificates cannot be read: {error}") from error

    def _check_description(self, described: _KeyDescription, challenge: bytes) -> None:
        least = self.settings.security_level
        for tlv in (described.attestation_security_level, described.keymaster_security_level):
            level = _enumerated(tlv)
            if level not in ENOUGH[least]:
                raise NotAttested(f"the security level is {level.hex()}, which is less than {least}")
        if described.challenge not in (challenge, _text_of(challenge)):
            raise NotAttested("the challenge is not that of this key and this request")
        if self.settings.verified_boot:
            _check_boot(_entry(described.hardware_enforced, ROOT_OF_TRUST, _RootOfTrust))
        app = asn1.decode_der(_ApplicationId, _entry(described.software_enforced, APPLICATION_ID, bytes))
        names = {package.name for package in app.packages.as_list()}
        if (
            self.settings.package.encode() not in names
            or bytes.fromhex(self.settings.signer) not in app.signers.as_list()
        ):
            raise NotAttested("the app that asked is not the one that is taken here")


@asn1.sequence
class _RootOfTrust:
    boot_key: bytes
    locked: bool
    state: asn1.TLV
    boot_hash: bytes | None


@asn1.sequence
class _Package:
    name: bytes
    version: int


@asn1.sequence
class _ApplicationId:
    packages: asn1.SetOf[_Package]
    signers: asn1.SetOf[bytes]


@asn1.sequence
class _KeyDescription:
    attestation_version: int
    attestation_security_level: asn1.TLV
    keymaster_version: int
    keymaster_security_level: asn1.TLV
    challenge: bytes
    unique_id: bytes
    software_enforced: list[asn1.TLV]
    hardware_enforced: list[asn1.TLV]


def _entry(entries: list[asn1.TLV], tag: bytes, kind: type[Any]) -> Any:
    """The only entry of an authorization list with this tag. Raises NotAttested, or ValueError."""
    matching = [entry for entry in entries if entry.tag_bytes == tag]
    if len(matching) != 1:
        raise NotAttested(f"the description of the key has {len(matching)} entries of the tag {tag.hex()}, and not one")
    return asn1.decode_der(kind, bytes(matching[0].data))


def _enumerated(tlv: asn1.TLV) -> bytes:
    """The bytes of an ENUMERATED. Raises ValueError."""
    if tlv.tag_bytes != b"\x0a":
        raise ValueError("an ENUMERATED is missing")
    return bytes(tlv.data)


def _check_boot(boot: _RootOfTrust) -> None:
    if not boot.locked or _enumerated(boot.state) != VERIFIED:
        raise NotAttested("the boot loader of the phone is not locked, or its system is not the maker's")


def _serials(path: Path) -> frozenset[int]:
    """Serial numbers in a list like https://android.googleapis.com/attestation/status. Raises OSError, ValueError."""
    try:
        entries = list(json.loads(path.read_bytes())["entries"])
        # Google's list is in hex but also has decimal entries, so an entry of only digits counts as both.
        return frozenset(int(serial, 16) for serial in entries) | {
            int(serial) for serial in entries if serial.isdecimal()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is no list of revoked certificates: {error!r}") from error


# Apple's App Attest: a statement in which a phone's hardware, and Apple, vouch for an app and its key.
#
# Spec: docs/spec/wire.md §9. The checks, in Apple's order:
# https://developer.apple.com/documentation/devicecheck/validating-apps-that-connect-to-your-server

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


_READ_SETTINGS, _STATEMENT = converter(AppleSettings), converter(_Statement)


@dataclass(frozen=True)
class ApplePhones:
    """The check of phones' evidence."""

    settings: AppleSettings
    roots: Roots

    @classmethod
    def load(cls, path: Path) -> ApplePhones:
        """The phones that a TOML file describes. Raises BadAppleFile, also for a file that it names."""
        try:
            settings = _READ_SETTINGS(tomllib.loads(path.read_text("utf-8")))
            return cls(settings, Roots.load(path.parent / settings.roots, _LONGEST))
        except OSError as error:
            raise BadAppleFile(f"{path}, or a file that it names, cannot be read: {error}") from error
        except (msgspec.ValidationError, ValueError) as error:
            raise BadAppleFile(f"{path} does not say which phones are taken: {error}") from error

    def check(self, statement: bytes, challenge: bytes, now: int) -> None:
        """Raise NotAttested unless a statement (a CBOR attestation object) is of the accepted app and this challenge.

        challenge: the 32 bytes that the app gave as clientDataHash, or whose digits it had hashed. now: seconds since
        1970.
        """
        attestation = _decoded(statement)
        leaf = self.roots.verify(attestation.evidence.x5c, now)[0]
        hashes = (challenge, hashlib.sha256(_text_of(challenge)).digest())
        if _nonce(leaf) not in [hashlib.sha256(attestation.authenticator + one).digest() for one in hashes]:
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


LEAST_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class Attestation:
    """The evidence that is accepted: none, a shared secret, an Android phone, an iOS device, or any of several."""

    accept_unattested: bool
    secret: bytes | None = field(default=None, repr=False)
    phones: AndroidPhones | None = None
    apples: ApplePhones | None = None

    @classmethod
    def of(
        cls,
        accept_unattested: bool,
        secret_file: Path | None,
        android_file: Path | None = None,
        apple_file: Path | None = None,
    ) -> Attestation:
        """An attestation from files. White space around the secret is dropped.

        Raises BadSecret, BadAndroidFile or BadAppleFile.
        """
        return cls(
            accept_unattested,
            None if secret_file is None else _secret(secret_file),
            None if android_file is None else AndroidPhones.load(android_file),
            None if apple_file is None else ApplePhones.load(apple_file),
        )

    def check(self, evidence: messages.Attestation, key: str, created: int) -> str:
        """The kind of the evidence for a public key, in a request signed at `created`. Raises NotAttested."""
        match evidence:
            case messages.SharedSecret(proof):
                if self.secret is None:
                    raise NotAttested("no enrolment secret is known here")
                if not hmac.compare_digest(proof, messages.shared_secret_proof(self.secret, key, created)):
                    raise NotAttested("the proof was not made with the enrolment secret that is known here")
                return "shared-secret"
            case messages.AndroidKey(chain):
                if self.phones is None:
                    raise NotAttested("no Android phone is taken here")
                self.phones.check(chain, messages.attestation_challenge(key, created), created)
                return "android-key"
            case messages.AppAttest(statement):
                if self.apples is None:
                    raise NotAttested("no iOS device is taken here")
                self.apples.check(statement, messages.attestation_challenge(key, created), created)
                return "app-attest"
            case messages.Unattested():
                if not self.accept_unattested:
                    raise NotAttested("no device is taken here without an attestation")
                return "none"


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise BadSecret(f"the enrolment secret cannot be read: {error}") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise BadSecret(f"{path} holds {len(secret)} bytes; an enrolment secret has at least {LEAST_SECRET_BYTES}")
    return secret
