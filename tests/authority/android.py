"""Phones for tests: chains of certificates in the layout of Android Key Attestation, under roots of our own."""

import datetime as dt
import hashlib
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from authority.attestation import KEY_DESCRIPTION

PACKAGE, SIGNER = "org.example.keyboard", hashlib.sha256(b"the certificate that signs the app").digest()
SOFTWARE, TEE, STRONGBOX = 0, 1, 2
VERIFIED, SELF_SIGNED, UNVERIFIED = 0, 1, 2
DAY = dt.timedelta(days=1)


def tlv(tag, *contents):
    """DER: a tag (as an integer), a length, and the contents one after another."""
    content = b"".join(contents)
    size = len(content)
    digits = size.to_bytes((size.bit_length() + 7) // 8)
    length = bytes([size]) if size < 128 else bytes([0x80 | len(digits)]) + digits
    return tag.to_bytes((tag.bit_length() + 7) // 8) + length + content


@dataclass(frozen=True)
class Described:
    """What a phone says of itself and of the app, as the extension of its leaf."""

    challenge: bytes
    level: int = TEE
    keymaster_level: int = TEE
    locked: bool = True
    state: int = VERIFIED
    package: str = PACKAGE
    signer: bytes = SIGNER
    root_of_trust_in_software: bool = False

    @property
    def der(self):
        boot = tlv(
            0x30,
            tlv(0x04, bytes(32)),
            tlv(0x01, b"\xff" if self.locked else b"\0"),
            tlv(0x0A, bytes([self.state])),
            tlv(0x04, bytes(32)),
        )
        root_of_trust = tlv(0xBF8540, boot)
        package = tlv(0x30, tlv(0x04, self.package.encode()), tlv(0x02, b"\x07"))
        app = tlv(0x30, tlv(0x31, package), tlv(0x31, tlv(0x04, self.signer)))
        software = tlv(0xBF853D, tlv(0x02, b"\x01")), tlv(0xBF8545, tlv(0x04, app))
        hardware = tlv(0xA1, tlv(0x31, tlv(0x02, b"\x02"))), tlv(0xA2, tlv(0x02, b"\x03"))
        first, second = (root_of_trust, b"") if self.root_of_trust_in_software else (b"", root_of_trust)
        return tlv(
            0x30,
            tlv(0x02, b"\x03"),
            tlv(0x0A, bytes([self.level])),
            tlv(0x02, b"\x04"),
            tlv(0x0A, bytes([self.keymaster_level])),
            tlv(0x04, self.challenge),
            tlv(0x04),
            tlv(0x30, *software, first),
            tlv(0x30, *hardware, second),
        )


@dataclass(frozen=True)
class Certified:
    """A certificate with the key that it is of."""

    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def der(self):
        return self.certificate.public_bytes(Encoding.DER)


def certify(name, by=None, *, at, ends=None, ca=True, may_sign=True, extension=None, oid=KEY_DESCRIPTION, key=None):
    """A certificate that `by` signs, or the key itself; good from a day before `at`, for 30 days."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    issuer = name if by is None else by.name
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - 2 * DAY)
        .not_valid_after(ends or at + 30 * DAY)
        .add_extension(
            x509.KeyUsage(not ca, False, False, False, False, ca and may_sign, False, False, False), critical=True
        )
    )
    if ca:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    if extension is not None:
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, extension), critical=False)
    return Certified(name, key, builder.sign((by.key if by else key), SHA256()))


@dataclass(frozen=True)
class Maker:
    """The maker of phones at a time: a root, and an intermediate certificate whose key is in a phone."""

    at: dt.datetime
    root: Certified = field(init=False)
    phone: Certified = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "root", certify("root", at=self.at))
        object.__setattr__(self, "phone", certify("phone", self.root, at=self.at))

    def chain(self, challenge, **described):
        """The chain that a phone gives for a challenge: leaf, intermediate, root."""
        leaf = certify("leaf", self.phone, at=self.at, ca=False, extension=Described(challenge, **described).der)
        return leaf.der, self.phone.der, self.root.der

    def settings(self, folder, **changes):
        """The file of an authority that takes phones of this maker with the one app."""
        pem = self.root.certificate.public_bytes(Encoding.PEM)
        (folder / "roots.pem").write_bytes(pem)
        given = {"roots": "roots.pem", "package": PACKAGE, "signer": SIGNER.hex()} | changes
        lines = (
            f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
            for name, value in given.items()
        )
        (folder / "android.toml").write_text("\n".join(lines))
        return folder / "android.toml"
