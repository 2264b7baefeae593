"""The authority's HTTP service: routes that issue credentials, draw beacons, and report health.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from authority.beacons import Beacons
from authority.errors import BeaconRefused, NotAttested
from authority.issuer import Issuer
from fedcore.errors import ForgedSignature, MalformedSignature, StaleSignature, WireError, WrongBody
from fedcore.wire import messages
from fedcore.wire.messages import DrawnBeacon, IssuedCredential, RequestBeacon, RequestCredential
from fedcore.wire.problems import PROBLEM_FIELD, PROBLEM_TYPE, problem
from ingress.addresses import caller_of
from ingress.connection import hang_up
from ingress.newcomers import Newcomers
from ingress.rate_limit import RateLimit
from ingress.signed_requests import Signed, named_key, read, signer_of

MOST_BYTES = 1 << 16
"""The most bytes of a message: the largest have a certificate chain (from a device) or a roster (coordinator)."""


class _TooLarge(Exception):
    """A body is longer than any message."""


class _TooOften(Exception):
    """An address has made too many requests; it is admitted again after `wait_s` seconds."""

    def __init__(self, wait_s: float) -> None:
        super().__init__("more requests than one address may make in a minute; come back later")
        self.wait_s = wait_s


_SLUGS: Mapping[type[Exception], str] = {
    MalformedSignature: "malformed-signature",
    ForgedSignature: "forged-signature",
    StaleSignature: "stale-signature",
    WrongBody: "digest-mismatch",
    NotAttested: "not-attested",
    BeaconRefused: "beacon-refused",
    WireError: "malformed-message",
    _TooLarge: "too-large",
    _TooOften: "too-many-requests",
}


def authority_app(issuer: Issuer, beacons: Beacons, newcomers: Newcomers, per_minute: int) -> Starlette:
    """The service. newcomers: the requests whose bodies are arriving.

    per_minute: the most requests for credentials from one address, and the most for beacons; 0 is no limit.
    """
    of_credentials, of_beacons = RateLimit(per_minute), RateLimit(per_minute)

    async def credentials(request: Request) -> IssuedCredential:
        """A credential for the device that signed."""
        _admit(request, of_credentials)
        signed = _signer(request, time.time())
        message = messages.decode(await _body(request, signed, newcomers), RequestCredential)
        return issuer.issue(message, signed.keyid, signed.created, time.time())

    async def draws(request: Request) -> DrawnBeacon:
        """A beacon for the coordinator that signed."""
        _admit(request, of_beacons)
        beacons.admit(read(request)[0].keyid)  # before the signature of an unknown key is checked
        signed = _signer(request, time.time())
        message = messages.decode(await _body(request, signed, newcomers), RequestBeacon)
        return DrawnBeacon(beacons.draw(message, time.time()))

    async def health(_: Request) -> Response:
        """Answer 200: the authority is running."""
        return Response("ok\n", media_type="text/plain")

    return Starlette(
        routes=[
            Route("/v1/credentials", _endpoint(credentials), methods=["POST"]),
            Route("/v1/beacons", _endpoint(draws), methods=["POST"]),
            Route("/healthz", health, methods=["GET"]),
        ]
    )


def _endpoint(answer: Callable[[Request], Awaitable[Struct]]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that sends the message of `answer`, or the problem document of its error."""

    async def endpoint(request: Request) -> Response:
        try:
            message = await answer(request)
        except tuple(_SLUGS) as error:
            return _problem(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return Response(messages.encode(message), media_type="application/json")

    return endpoint


def _admit(request: Request, limit: RateLimit) -> None:
    """Count a request of an address, before any work for it. Raises _TooOften."""
    caller = caller_of(request.client.host) if request.client else None
    wait_s = 0.0 if caller is None else limit.wait_s(caller)
    if wait_s:
        raise _TooOften(wait_s)


def _signer(request: Request, now: float) -> Signed:
    """The signer of a request, whose key id is the key itself. Raises WireError."""
    signature, about = read(request)
    signature.check_time(now)
    return signer_of(signature, about, named_key(signature))


async def _body(request: Request, signed: Signed, newcomers: Newcomers) -> bytes:
    """The signed body."""
    body = bytearray()
    with newcomers.hold(partial(hang_up, request.scope)):
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BYTES:
                raise _TooLarge(f"this address takes at most {MOST_BYTES} bytes")
    signed.check(hashlib.sha256(body).digest())
    return bytes(body)


def _problem(error: Exception) -> Response:
    slug = next(slug for kind, slug in _SLUGS.items() if isinstance(error, kind))
    document, fields = problem(slug, str(error)), {PROBLEM_FIELD: slug}
    if isinstance(error, _TooOften):
        fields["Retry-After"] = str(math.ceil(error.wait_s))
    return Response(messages.encode(document), document.status, fields, media_type=PROBLEM_TYPE)
