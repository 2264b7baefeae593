"""Signed requests: the profile of RFC 9421 by which a device proves its identity. Spec: docs/spec/wire.md §10.

Both ends build the same text of a request, the signature base, and sign it or check it. The caller knows the time, the
owner of a key, and whether a request came before.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedcore.errors import ForgedSignature, InvalidKey, MalformedSignature, StaleSignature
from fedcore.signing import base64url, from_base64url

ED25519, ECDSA_P256 = "ed25519", "ecdsa-p256-sha256"
COVERED = ("@method", "@authority", "@path", "@query")
"""The components that every signature covers, besides those of SIGNED_FIELDS that the request has."""
DIGEST = "content-digest"
SIGNED_FIELDS = (DIGEST, "upload-offset", "upload-length", "upload-complete", "repr-digest")
"""Header fields that a signature covers in every request that has them."""
WINDOW_S = 300
"""The longest validity of a signature, and its greatest age."""
AHEAD_S = 1.0
"""The most that a device's clock may be ahead of the receiver's."""
LABEL = "device"
_P256_COORDINATE = 32
_ID_HEX = 32
_LONGEST = 2048
_ITEM = r'"[a-z@][a-z0-9-]*"'
_INPUT = re.compile(rf"([a-z*][a-z0-9_.*-]*)=(\(({_ITEM}(?: {_ITEM})*)\)((?:;[a-z]+=[^;]+)+))")
KEY_ID = re.compile(r"[A-Za-z0-9_.:=+/-]{1,200}")
"""The form of the key ids that a signature can name."""
_TIME, _NAME = "([0-9]{1,15})", f'"({KEY_ID.pattern})"'
_FORMS = {"created": _TIME, "expires": _TIME, "nonce": _NAME, "keyid": _NAME}
_PARAMETERS = re.compile("".join(rf"(?=(?:;[^;]+)*?;{name}={form}(?:;|\Z))" for name, form in _FORMS.items()))
"""All parameters, in any order; there may be others."""
_VALUE = re.compile(r"([a-z*][a-z0-9_.*-]*)=:([A-Za-z0-9+/]+=*):")
_DIGEST = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*(?:$|[,;])")

PrivateKey: TypeAlias = Ed25519PrivateKey | EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A device's key as the coordinator knows it. `text` is `<algorithm>:` and the key's bytes in base64url."""

    text: str
    _key: Ed25519PublicKey | EllipticCurvePublicKey

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """The key that a text names: 32 bytes of Ed25519, or an uncompressed point of P-256. Raises InvalidKey."""
        algorithm, _, value = text.partition(":")
        try:
            data = from_base64url(value)
            if algorithm == ED25519:
                return cls(text, Ed25519PublicKey.from_public_bytes(data))
            if algorithm == ECDSA_P256 and len(data) == 2 * _P256_COORDINATE + 1:
                return cls(text, EllipticCurvePublicKey.from_encoded_point(SECP256R1(), data))
        except ValueError as error:
            raise InvalidKey(f"{text[:100]!r} is not a public key: {error}") from error
        raise InvalidKey(f"{text[:100]!r} is not a public key: it must be {ED25519}: or {ECDSA_P256}: and the key")

    @classmethod
    def of(cls, private: PrivateKey) -> PublicKey:
        """The public half of a private key. Raises InvalidKey when it lies on another curve than P-256."""
        key = private.public_key()
        if isinstance(key, Ed25519PublicKey):
            return cls(f"{ED25519}:{base64url(key.public_bytes_raw())}", key)
        if not isinstance(key.curve, SECP256R1):
            raise InvalidKey(f"a device signs with Ed25519 or P-256, not with {key.curve.name}")
        return cls(f"{ECDSA_P256}:{base64url(key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint))}", key)

    @property
    def algorithm(self) -> str:
        """Its name in RFC 9421."""
        return self.text.partition(":")[0]

    def check(self, signature: bytes, message: bytes) -> None:
        """Raise ForgedSignature unless this key made the signature over the message."""
        try:
            if isinstance(self._key, Ed25519PublicKey):
                self._key.verify(signature, message)
            else:
                self._key.verify(_as_der(signature), message, ECDSA(SHA256()))
        except InvalidSignature as error:
            raise ForgedSignature("the signature is not this key's over this request") from error


@dataclass(frozen=True, slots=True)
class Signer:
    """The signer of requests: a private key, and the name by which the coordinator finds the public one."""

    keyid: str
    key: PrivateKey

    def headers(self, request: SignableRequest, created: int) -> dict[str, str]:
        """The two header fields of a fresh signature over a request, good for five minutes from `created`."""
        covered = (*COVERED, *(name for name in SIGNED_FIELDS if request.field(name) is not None))
        items = " ".join(f'"{name}"' for name in covered)
        nonce = base64url(secrets.token_bytes(16))
        text = f'({items});created={created};expires={created + WINDOW_S};nonce="{nonce}";keyid="{self.keyid}"'
        signature = base64.b64encode(sign(self.key, signature_base(request.values(covered), text))).decode()
        return {"Signature-Input": f"{LABEL}={text}", "Signature": f"{LABEL}=:{signature}:"}


class SignableRequest(msgspec.Struct, frozen=True):
    """The parts of a request that can be signed. `target`: path and query as they are sent; `field`: gives a header."""

    method: str
    authority: str
    target: str
    field: Callable[[str], str | None]

    def values(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """The components of these names with their values. Raises MalformedSignature when the request lacks one."""
        path, _, query = self.target.partition("?")
        derived = {"@method": self.method, "@authority": self.authority.lower(), "@path": path, "@query": f"?{query}"}
        pairs = []
        for name in names:
            value = derived.get(name) if name.startswith("@") else self.field(name)
            if value is None:
                raise MalformedSignature(f"the signature covers {name!r}, which this request does not have")
            pairs.append((name, value.strip()))
        return pairs


class Signature(msgspec.Struct, frozen=True):
    """A signature as it came: what it covers, its parameters, and both as the text that was signed."""

    covered: tuple[str, ...]
    created: int
    expires: int
    nonce: str
    keyid: str
    text: str
    value: bytes

    @classmethod
    def parse(cls, signature_input: str, signature: str) -> Signature:
        """The one signature in the two header fields of a request. Raises MalformedSignature.

        Both must be in the one spelling in which RFC 8941 serialises them, so that the text is what was signed.
        """
        parsed, value = _INPUT.fullmatch(signature_input), _VALUE.fullmatch(signature)
        if parsed is None or value is None or parsed[1] != value[1] or len(signature_input) > _LONGEST:
            raise MalformedSignature("Signature-Input and Signature must hold one signature, of one label")
        covered = tuple(parsed[3][1:-1].split('" "'))
        if len(set(covered)) < len(covered):
            raise MalformedSignature("the signature covers something twice")
        parameters = _PARAMETERS.match(parsed[4])
        if parameters is None or parsed[4].count(";") != len(_FORMS):
            raise MalformedSignature("a signature has created, expires, nonce and keyid, each once, and no others")
        try:
            data = base64.b64decode(value[2], validate=True)
        except ValueError as error:
            raise MalformedSignature(f"the signature is not base64: {error}") from error
        created, expires, nonce, keyid = parameters.groups()
        return cls(covered, int(created), int(expires), nonce, keyid, parsed[2], data)

    def check_time(self, now: float) -> None:
        """Raise StaleSignature if the signature is not fresh, MalformedSignature if it is valid for too long."""
        if not 0 <= self.expires - self.created <= WINDOW_S:
            raise MalformedSignature(f"a signature is good for at most {WINDOW_S} s, from `created` to `expires`")
        if not now - WINDOW_S <= self.created <= now + AHEAD_S:
            raise StaleSignature(f"the signature was made at {self.created}, and it is {now:.0f} here")
        if self.expires <= now:
            raise StaleSignature(f"the signature expired at {self.expires}, and it is {now:.0f} here")

    def check(self, request: SignableRequest, key: PublicKey) -> None:
        """Raise ForgedSignature unless the key made this signature over this request; MalformedSignature as above."""
        key.check(self.value, signature_base(request.values(self.covered), self.text))


def read_signature(method: str, target: str, fields: Mapping[str, str]) -> tuple[Signature, SignableRequest]:
    """The signature of a request, and the request that it covers. The signature covers all that it must, and is not
    verified yet.

    fields: by name in lower case, those of the signature among them. Raises MalformedSignature.
    """
    signature = Signature.parse(fields["signature-input"], fields["signature"])
    has_body = fields.get("content-length", "0") != "0" or "transfer-encoding" in fields
    demanded = {name for name in SIGNED_FIELDS if name in fields or (name == DIGEST and has_body)}
    missing = demanded.union(COVERED) - set(signature.covered)
    if missing:
        raise MalformedSignature(f"the signature does not cover {', '.join(sorted(missing))}")
    return signature, SignableRequest(method, fields.get("host", ""), target, fields.get)


def device_id(key: str) -> str:
    """The id of the device with this public key (as text); it depends on nothing else."""
    return hashlib.sha256(key.encode()).hexdigest()[:_ID_HEX]


def signature_base(values: Iterable[tuple[str, str]], parameters: str) -> bytes:
    """The text that is signed (RFC 9421 §2.5): a line for each component, and one for `parameters`, as serialised.

    Raises MalformedSignature when something in it is not ASCII.
    """
    lines = [f'"{name}": {value}' for name, value in values]
    try:
        return "\n".join([*lines, f'"@signature-params": {parameters}']).encode("ascii")
    except UnicodeEncodeError as error:
        raise MalformedSignature("a signature covers nothing but ASCII") from error


def sign(key: PrivateKey, message: bytes) -> bytes:
    """A signature of 64 bytes, as RFC 9421 §3.3 has it: of ECDSA, r and s one after the other."""
    if isinstance(key, Ed25519PrivateKey):
        return key.sign(message)
    r, s = decode_dss_signature(key.sign(message, ECDSA(SHA256())))
    return r.to_bytes(_P256_COORDINATE) + s.to_bytes(_P256_COORDINATE)


def content_digest(body: bytes | memoryview) -> str:
    """The digest of bytes, as Content-Digest and Repr-Digest say it (RFC 9530)."""
    return digest_field(hashlib.sha256(body).digest())


def digest_field(sha256: bytes) -> str:
    """A SHA-256 of 32 bytes as Content-Digest and Repr-Digest say it (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"


def sha256_in(header: str | None) -> bytes | None:
    """The SHA-256 that a digest header names, of 32 bytes; None when it names none."""
    match = _DIGEST.search(header or "")
    return None if match is None else base64.b64decode(match[1])


def _as_der(signature: bytes) -> bytes:
    if len(signature) != 2 * _P256_COORDINATE:
        raise InvalidSignature
    r, s = (int.from_bytes(half) for half in (signature[:_P256_COORDINATE], signature[_P256_COORDINATE:]))
    return encode_dss_signature(r, s)
