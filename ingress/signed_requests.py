"""Signed requests over HTTP: reading and checking signatures and the bodies that they cover.

Spec: docs/spec/wire.md §10.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from fedcore.errors import InvalidKey, MalformedSignature, Unsigned, WrongBody
from fedcore.wire.signatures import DIGEST, PublicKey, SignableRequest, Signature, read_signature, sha256_in


class Signed(msgspec.Struct, frozen=True):
    """The signer of a request whose signature was checked. `digest`: of the body."""

    keyid: str
    created: int
    digest: bytes | None

    def check(self, sha256: bytes) -> None:
        """Raise WrongBody unless a body's SHA-256 is the signed one. Without a digest no body was signed."""
        if self.digest is not None and self.digest != sha256:
            raise WrongBody("the body is not the one that Content-Digest was made of; send it again")


def read(request: Request) -> tuple[Signature, SignableRequest]:
    """The signature of a request, and the request that it covers. The signature covers all that it must, and is not
    verified yet.

    Raises Unsigned or MalformedSignature.
    """
    fields = _fields(request)
    if "signature" not in fields or "signature-input" not in fields:
        raise Unsigned("sign the request with the device's key, as RFC 9421 and the device protocol say")
    return read_signature(request.method, _target(request), fields)


def named_key(signature: Signature) -> PublicKey:
    """The public key that a signature names as its keyid. Raises MalformedSignature when the keyid is no public key."""
    try:
        return PublicKey.parse(signature.keyid)
    except InvalidKey as error:
        raise MalformedSignature(f"here, keyid is the public key: {error}") from error


def signer_of(signature: Signature, about: SignableRequest, key: PublicKey) -> Signed:
    """The signer, if the holder of `key` signed this request. Raises ForgedSignature, MalformedSignature.

    This checks neither the time of the signature nor whether it came before.
    """
    signature.check(about, key)
    if DIGEST not in signature.covered:
        return Signed(signature.keyid, signature.created, None)
    digest = sha256_in(about.field(DIGEST))
    if digest is None:
        raise MalformedSignature("send the body's digest as Content-Digest: sha-256=:<base64>:")
    return Signed(signature.keyid, signature.created, digest)


def _target(request: Request) -> str:
    path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _fields(request: Request) -> dict[str, str]:
    """The header fields by lower-case name, lines of one name joined as RFC 9110 joins them."""
    fields: dict[str, str] = {}
    for name, value in request.scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        fields[key] = f"{fields[key]}, {text}" if key in fields else text
    return fields
