"""iOS devices for tests: statements in the layout of App Attest, under a root of our own."""

import hashlib
import struct
from dataclasses import dataclass, field

import cbor2
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from authority.attestation import NONCE, PRODUCTION
from tests.authority.android import Certified, certify, tlv

APP = "ABCDE12345.org.example.keyboard"


def key_id(key):
    """The id that App Attest gives to a key."""
    return hashlib.sha256(key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)).digest()


def authenticator(of, app=APP, counter=0, environment=PRODUCTION):
    """Authenticator data of the key with this id."""
    head = hashlib.sha256(app.encode()).digest() + struct.pack(">BI", 0x40, counter)
    return head + environment + struct.pack(">H", len(of)) + of + b"a key in COSE"


def encoded(*chain, data, fmt="apple-appattest"):
    """An attestation object."""
    return cbor2.dumps({"fmt": fmt, "attStmt": {"x5c": list(chain), "receipt": b"for Apple"}, "authData": data})


@dataclass(frozen=True)
class Apple:
    """Apple at a time: a root, and the intermediate certificate that signs those of devices."""

    at: object
    root: Certified = field(init=False)
    devices: Certified = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "root", certify("root", at=self.at))
        object.__setattr__(self, "devices", certify("devices", self.root, at=self.at))

    def leaf(self, key, data, challenge, **changes):
        """The certificate of a key, whose nonce is over authenticator data and a challenge."""
        nonce = tlv(0x30, tlv(0xA1, tlv(0x04, hashlib.sha256(data + challenge).digest())))
        given = {"extension": nonce, "oid": NONCE, "key": key} | changes
        return certify("leaf", self.devices, at=self.at, ca=False, **given)

    def statement(self, challenge, of=None, **said):
        """What a device gives for a challenge. of: another key id than that of its key; said: by `authenticator`."""
        key = ec.generate_private_key(ec.SECP256R1())
        data = authenticator(of or key_id(key), **said)
        return encoded(self.leaf(key, data, challenge).der, self.devices.der, data=data)

    def settings(self, folder, **changes):
        """The file of an authority that takes iOS devices with the one app."""
        (folder / "apple.pem").write_bytes(self.root.certificate.public_bytes(Encoding.PEM))
        given = {"roots": "apple.pem", "app": APP} | changes
        lines = (f"{name} = {str(value).lower() if value is True else repr(value)}" for name, value in given.items())
        (folder / "apple.toml").write_text("\n".join(lines))
        return folder / "apple.toml"
