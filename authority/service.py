"""The authority's HTTP service: routes that issue credentials, draw beacons, and say that it is there.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from authority.beacons import Beacons
from authority.errors import BeaconRefused, NotAttested
from authority.issuer import Issuer
from fedcore.errors import (
    DigestMismatch,
    ForgedSignature,
    InvalidKey,
    MalformedSignature,
    StaleSignature,
    WireError,
)
from fedcore.wire import messages
from fedcore.wire.messages import DrawnBeacon, RequestBeacon, RequestCredential
from fedcore.wire.problems import PROBLEM_FIELD, PROBLEM_TYPE, problem
from fedcore.wire.signatures import DIGEST, PublicKey, read_signature, sha256_in
from ingress.connection import hang_up
from ingress.newcomers import Newcomers

MOST_BYTES = 1 << 16
"""Bytes of a message: a chain of certificates is the longest part of a device's, a roster of a coordinator's."""


class _TooLarge(Exception):
    """A body is longer than any message."""


_SLUGS: Mapping[type[Exception], str] = {
    MalformedSignature: "malformed-signature",
    ForgedSignature: "forged-signature",
    StaleSignature: "stale-signature",
    DigestMismatch: "digest-mismatch",
    NotAttested: "not-attested",
    BeaconRefused: "beacon-refused",
    WireError: "malformed-message",
    _TooLarge: "too-large",
}


def authority_app(issuer: Issuer, beacons: Beacons, newcomers: Newcomers) -> Starlette:
    """The service. newcomers: the requests whose bodies are on their way."""

    async def credentials(request: Request) -> Response:
        try:
            signed = _signer(request, time.time())
            asked = messages.decode(await _body(request, signed, newcomers), RequestCredential)
            issued = issuer.issue(asked, signed.key, signed.created, time.time())
        except tuple(_SLUGS) as error:
            return _problem(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return Response(messages.encode(issued), media_type="application/json")

    async def draws(request: Request) -> Response:
        try:
            signed = _signer(request, time.time())
            beacons.admit(signed.key)
            asked = messages.decode(await _body(request, signed, newcomers), RequestBeacon)
            drawn = DrawnBeacon(beacons.draw(asked, time.time()))
        except tuple(_SLUGS) as error:
            return _problem(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return Response(messages.encode(drawn), media_type="application/json")

    async def health(_: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    return Starlette(
        routes=[
            Route("/v1/credentials", credentials, methods=["POST"]),
            Route("/v1/beacons", draws, methods=["POST"]),
            Route("/healthz", health, methods=["GET"]),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Signed:
    """The public key, as text, that signed a request, when it did, and the digest that it signed of the body."""

    key: str
    created: int
    digest: bytes | None

    def check(self, body: bytes) -> None:
        if self.digest != hashlib.sha256(body).digest():
            raise DigestMismatch("the body is not the one that Content-Digest was made of; send it again")


def _signer(request: Request, now: float) -> _Signed:
    """The signer of a request, a key that names itself. Raises WireError."""
    fields = {name.lower(): ", ".join(request.headers.getlist(name)) for name in request.headers}
    if "signature" not in fields or "signature-input" not in fields:
        raise MalformedSignature("sign the request with the device's key, as RFC 9421 and the device protocol say")
    signature, about = read_signature(request.method, _target(request), fields)
    signature.check_time(now)
    try:
        key = PublicKey.parse(signature.keyid)
    except InvalidKey as error:
        raise MalformedSignature(f"here, keyid is the public key: {error}") from error
    signature.check(about, key)
    return _Signed(signature.keyid, signature.created, sha256_in(fields.get(DIGEST)))


def _target(request: Request) -> str:
    path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


async def _body(request: Request, signed: _Signed, newcomers: Newcomers) -> bytes:
    """The body that was signed."""
    body = bytearray()
    with newcomers.hold(partial(hang_up, request.scope)):
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BYTES:
                raise _TooLarge(f"this address takes at most {MOST_BYTES} bytes")
    signed.check(bytes(body))
    return bytes(body)


def _problem(error: Exception) -> Response:
    slug = next(slug for kind, slug in _SLUGS.items() if isinstance(error, kind))
    document = problem(slug, str(error))
    return Response(messages.encode(document), document.status, {PROBLEM_FIELD: slug}, media_type=PROBLEM_TYPE)
