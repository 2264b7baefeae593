"""The authority as a process: HTTP routes that issue credentials, draw beacons, report health; its key, port and end.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from authority.attestation import Attestation
from authority.configuration import AuthorityConfig
from authority.errors import BeaconRefused, InvalidSettings, KeyMissing, NotAttested
from fedcore.errors import ForgedSignature, MalformedSignature, StaleSignature, WireError, WrongBody
from fedcore.signing import SucceedingKey, key_text, public_key
from fedcore.wire import messages
from fedcore.wire.messages import (
    PROBLEM_FIELD,
    PROBLEM_TYPE,
    DrawnBeacon,
    IssuedCredential,
    RequestBeacon,
    RequestCredential,
    problem,
)
from fedcore.wire.signatures import device_id
from ingress.connection import hang_up
from ingress.limits import ConnectionLimits, Newcomers, RateLimit, caller_of, networks
from ingress.server import HttpConfig, Signed, listening, named_key, open_to, origins, read, signer_of
from secagg.encoding import DIGEST_BYTES
from secagg.errors import BadSignature, SecaggError
from secagg.keys import check_possession, issue, root_of
from secagg.messages import Invite, draw_beacon
from secagg.parameters import GraphParameters

# The issuer of credentials: it attests a device, checks that the device holds its key, and signs. Pure: time is an
# argument.
#
# Spec: docs/spec/wire.md §9.


@dataclass(frozen=True, slots=True)
class Issuer:
    """The authority's key, the evidence that it accepts, and the validity of its credentials, in seconds."""

    key: SucceedingKey
    attestation: Attestation
    lasting_s: int

    def issue(self, request: RequestCredential, key: str, created: int, now: float) -> IssuedCredential:
        """The credential of the device that signs with `key` (as text), which signed this request at `created`.

        Raises NotAttested, also when the device does not prove that it holds the key that it names.
        """
        self.attestation.check(request.attestation, key, created)
        try:
            check_possession(request.secagg, request.possession, hashlib.sha256(key.encode()).digest(), created)
        except BadSignature as error:
            raise NotAttested("the proof of possession is not one of the key for secure aggregation") from error
        device = bytes.fromhex(device_id(key))
        return IssuedCredential(
            issue(self.key.private, request.secagg, device, int(now) + self.lasting_s), self.key.succession
        )


# Beacons of secure rounds: one draw per device and invitation, so that a coordinator cannot try several.
#
# Pure: time is an argument. Spec: docs/spec/wire.md §9.

MOST_DEVICES = 1 << 20
"""The most devices that are remembered at a time, over all invitations: about 200 MB."""


@dataclass(slots=True)
class Beacons:
    """The draws of one process. It remembers every roster until its invitation's deadline, and draws none after that.

    key: the authority's. servers: the public keys, as text, of the coordinators that may ask. most: the most devices
    that are remembered at a time.
    """

    key: Ed25519PrivateKey
    servers: Collection[str] = ()
    most: int = MOST_DEVICES
    _drawn: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)
    _deadlines: list[tuple[int, bytes]] = field(default_factory=list)
    _now: float = 0.0

    def admit(self, server: str) -> None:
        """Raise BeaconRefused unless the authority draws beacons for the coordinator with this key (as text)."""
        if server not in self.servers:
            raise BeaconRefused(
                f"this authority draws no beacons for the key {server[:60]}: start it with --server-key and the key "
                "that `muster coordinator keys show` prints"
            )

    def draw(self, request: RequestBeacon, now: float) -> bytes:
        """The beacon of a roster, 64 bytes; equal rosters get equal beacons.

        Raises BeaconRefused if a device of the roster is on another roster for the same invitation, after the
        invitation's deadline, and when there are too many rosters to remember.
        """
        try:
            invite, _ = Invite.decode(request.invitation)
        except SecaggError as error:
            raise BeaconRefused(f"the invitation cannot be read: {error}") from error
        if len(request.roster) % DIGEST_BYTES or not 0 < len(request.roster) <= DIGEST_BYTES * invite.n_max:
            raise BeaconRefused(f"a roster is 1 to {invite.n_max} hashes of {DIGEST_BYTES} bytes each, joined")
        places = range(0, len(request.roster), DIGEST_BYTES)
        leaves = [request.roster[place : place + DIGEST_BYTES] for place in places]
        chosen = GraphParameters(len(leaves), request.neighbours, request.shares)
        self._forget(now)
        if invite.deadline < self._now:
            raise BeaconRefused("the deadline of the invitation is over: nothing is drawn for it any more")
        beacon = draw_beacon(self.key, invite.hash, chosen, root_of(leaves))
        self._remember(invite, leaves, beacon)
        return beacon

    def _forget(self, now: float) -> None:
        self._now = max(self._now, now)  # setting the clock back does not revive a deadline
        while self._deadlines and self._deadlines[0][0] < self._now:
            del self._drawn[heapq.heappop(self._deadlines)[1]]

    def _remember(self, invite: Invite, leaves: list[bytes], beacon: bytes) -> None:
        drawn = self._drawn.get(invite.hash, {})
        if any(drawn.get(leaf, beacon) != beacon for leaf in leaves):
            raise BeaconRefused("a device of this roster is on another one of the same invitation: that was drawn once")
        fresh = [leaf for leaf in leaves if leaf not in drawn]
        if sum(map(len, self._drawn.values())) + len(fresh) > self.most:
            raise BeaconRefused(f"rosters of {self.most} devices are remembered already; try again after their rounds")
        if not drawn:
            heapq.heappush(self._deadlines, (invite.deadline, invite.hash))
        self._drawn[invite.hash] = drawn | dict.fromkeys(fresh, beacon)


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


# The authority as a process: its key's file, its port, and its end.


T = TypeVar("T")
DAY_S = 86_400
DRAIN_S = 10.0
"""The longest time that a stop waits for requests in progress."""


def serve(config: AuthorityConfig, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM or SIGINT. on_ready: called with the URL once requests are answered.

    Raises ingress.limits.CannotListen, InvalidSettings for text that cannot be parsed, and as `issuer_of`.
    """
    AuthorityServer(config, on_ready).run()


def issuer_of(config: AuthorityConfig) -> Issuer:
    """The issuer of credentials. Raises KeyMissing, InvalidKey, BadSecret, BadAndroidFile or BadAppleFile."""
    if not config.key.exists():
        raise KeyMissing(
            f"there is no key at {config.key}: `muster authority new-key {config.key}` makes one, and if there was "
            "one, put it back, since devices trust no other"
        )
    files = config.enrolment_secret_file, config.android_file, config.apple_file
    attestation = Attestation.of(config.accept_unattested, *files)
    return Issuer(SucceedingKey.load("authority", config.key), attestation, int(config.credential_days * DAY_S))


def _app(config: AuthorityConfig) -> Starlette:
    issuer = issuer_of(config)
    servers = {key_text(public_key(text).public_bytes_raw()) for text in config.server_keys}
    newcomers = Newcomers(config.connection_limit)
    return authority_app(issuer, Beacons(issuer.key.private, servers), newcomers, config.address_limit_per_minute)


class AuthorityServer(uvicorn.Server):
    """The HTTP server of an authority. on_ready: called with the URL once requests are answered."""

    def __init__(self, config: AuthorityConfig, on_ready: Callable[[str], None]) -> None:
        proxies = _parsed("trusted_proxies", networks, config.trusted_proxies)
        self._limits = ConnectionLimits(config.connection_limit, config.address_connection_limit, proxies)
        self._http = HttpConfig(tls_cert=config.tls_cert, tls_key=config.tls_key, drain_s=DRAIN_S)
        app = open_to(_parsed("allowed_origins", origins, config.allowed_origins), _app(config))
        super().__init__(self._http.uvicorn(app, self._limits))
        self._wanted = config
        self._on_ready = on_ready

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and serve until told to stop. Raises ingress.limits.CannotListen."""
        with listening(self._wanted.host, self._wanted.port, self._limits) as listener:
            super().run([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report the URL."""
        await super().startup(sockets)
        if sockets and self.started:
            self._on_ready(self._http.url(sockets[0]))


def _parsed(name: str, parse: Callable[[str], T], texts: Sequence[str]) -> T:
    try:
        return parse(",".join(texts))
    except ValueError as error:
        raise InvalidSettings(f"{name}: {error}") from error
