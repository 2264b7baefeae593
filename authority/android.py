"""Android Key Attestation: a certificate chain in which a phone's secure hardware describes its system and its app.

Spec: docs/spec/wire.md §9. Layout of the extension: https://source.android.com/docs/security/features/keystore/attestation
"""

from __future__ import annotations

import hmac
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cryptography import x509
from cryptography.hazmat import asn1

from authority.certificates import UNREADABLE, Roots, extension_of
from authority.errors import BadAndroidFile, NotAttested
from fedcore.decoding import converter
from fedcore.wire.messages import MOST_CERTIFICATES

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
            roots = Roots.load(path.parent / settings.roots, MOST_CERTIFICATES)
            listed = path.parent / settings.revoked if settings.revoked is not None else None
            return cls(settings, roots, frozenset() if listed is None else _serials(listed))
        except OSError as error:
            raise BadAndroidFile(f"{path}, or a file that it names, cannot be read: {error}") from error
        except (msgspec.ValidationError, ValueError) as error:
            raise BadAndroidFile(f"{path} does not say which phones are taken: {error}") from error

    def check(self, chain: Sequence[bytes], challenge: bytes, now: int) -> None:
        """Raise NotAttested unless a chain (DER, leaf first) is of an accepted phone and names this challenge.

        challenge: the 32 bytes that the leaf must name. now: seconds since 1970.
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
        if not hmac.compare_digest(described.challenge, challenge):
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
