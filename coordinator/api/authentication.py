"""Authentication of devices: every request is signed, and its signature is checked before the body is read.

Spec: docs/spec/wire.md §10.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from coordinator.api.limits import RateLimit
from coordinator.api.lru_cache import LruCache
from coordinator.api.replays import Replays
from coordinator.errors import (
    DeviceRevoked,
    DigestMismatch,
    ForgedSignature,
    MalformedSignature,
    TooManyRequests,
    Unavailable,
    UnknownDevice,
    Unsigned,
)
from coordinator.metrics import Metrics
from coordinator.rules.entities import Device
from coordinator.store.tasks import CoordinatorStore
from fedcore import errors
from fedcore.wire.signatures import DIGEST, PublicKey, SignableRequest, Signature, read_signature, sha256_in

KEYS = 1 << 16
"""Public keys kept in memory, at about 600 bytes each."""
REQUESTS = 1 << 20
"""Signatures of five minutes that are remembered."""
_SIGNED = "muster.signed"


@dataclass(frozen=True, slots=True)
class Signed:
    """The signer of a request: the device's id, or at enrolment the key itself. `digest` is that of the body."""

    keyid: str
    created: int
    digest: bytes | None

    def check(self, digest: bytes) -> None:
        """Raise DigestMismatch unless a body's SHA-256 is the signed one. Without one there was no body to sign."""
        if self.digest is not None and self.digest != digest:
            raise DigestMismatch("the body is not the one that Content-Digest was made of; send it again")


class Authenticator:
    """Checks signatures. Its methods run before a route's endpoint, and keep the signer in the request's scope.

    limit: how often a device may ask, which also bounds its share of what is remembered. steady: a clock that nobody
    sets.
    """

    def __init__(
        self,
        store: CoordinatorStore,
        limit: RateLimit,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._limit = limit
        self._metrics = metrics
        self._clock, self._steady = clock, steady
        self._keys: LruCache[str, tuple[PublicKey, float]] = LruCache(KEYS)
        self._replays = Replays(REQUESTS)
        self._revoked: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Begin to answer, or to answer for more: signatures that another process may have accepted are refused."""
        self._replays.begin(self._clock(), self._steady())

    def refuse(self, devices: frozenset[str]) -> None:
        """Refuse these devices, whose keys may be in memory, and of those only these. From any thread."""
        self._revoked = devices

    async def device(self, request: Request) -> None:
        """Demand an enrolled device's signature.

        Raises Unauthenticated, DeviceRevoked, TooManyRequests or Unavailable.
        """
        signature, about = self._read(request)
        key, since = self._keys.get(signature.keyid) or await self._find(signature.keyid)
        _check(signature, about, key)
        if signature.keyid in self._revoked:
            raise DeviceRevoked
        self._replays.demand_new(signature, since, self._clock(), self._steady())
        self._admit(signature)
        request.scope[_SIGNED] = _signed(signature, about)

    async def new_device(self, request: Request) -> None:
        """Demand the signature of a key that names itself. Raises Unauthenticated.

        To enrol twice is the same as once, so these are not remembered: anybody can make keys, and fill a memory.
        """
        signature, about = self._read(request)
        try:
            key = PublicKey.parse(signature.keyid)
        except errors.InvalidKey as error:
            raise MalformedSignature(f"at enrolment, keyid is the public key: {error}") from error
        _check(signature, about, key)
        request.scope[_SIGNED] = _signed(signature, about)

    def _admit(self, signature: Signature) -> None:
        """Count a device's own request: replays by others are not counted against it."""
        try:
            self._limit.admit(signature.keyid)
            self._replays.remember(signature)
        except (TooManyRequests, Unavailable) as refusal:
            self._metrics.shed.labels("device" if isinstance(refusal, TooManyRequests) else "signatures").inc()
            raise

    def _read(self, request: Request) -> tuple[Signature, SignableRequest]:
        """The signature of a request, which is fresh and covers all that it must."""
        fields = _fields(request)
        if "signature" not in fields or "signature-input" not in fields:
            raise Unsigned("sign the request with the device's key, as RFC 9421 and the device protocol say")
        try:
            signature, about = read_signature(request.method, _target(request), fields)
        except errors.MalformedSignature as error:
            raise MalformedSignature(str(error)) from error
        self._replays.check(signature, self._clock())
        return signature, about

    async def _find(self, device: str) -> tuple[PublicKey, float]:
        found = await run_in_threadpool(self._look_up, device)
        return self._keys.put(device, (PublicKey.parse(found.key), found.enrolled_at))

    def _look_up(self, device: str) -> Device:
        with self._store.database.reading() as records:
            found = records.devices.find(device)
        if found is None:
            raise UnknownDevice("no device has this id here; enrol")
        demand_allowed(found)
        return found


def demand_allowed(device: Device) -> None:
    """Raise DeviceRevoked for a device that an operator has revoked."""
    if device.revoked_at is not None:
        raise DeviceRevoked


def signed(request: Request) -> Signed:
    """The signer of a request that an Authenticator has checked."""
    signer: Signed = request.scope[_SIGNED]
    return signer


def _signed(signature: Signature, request: SignableRequest) -> Signed:
    """The signer, and the digest of the body. Raises MalformedSignature."""
    if DIGEST not in signature.covered:
        return Signed(signature.keyid, signature.created, None)
    digest = sha256_in(request.field(DIGEST))
    if digest is None:
        raise MalformedSignature("send the body's digest as Content-Digest: sha-256=:<base64>:")
    return Signed(signature.keyid, signature.created, digest)


def _check(signature: Signature, request: SignableRequest, key: PublicKey) -> None:
    try:
        signature.check(request, key)
    except errors.MalformedSignature as error:
        raise MalformedSignature(str(error)) from error
    except errors.ForgedSignature as error:
        raise ForgedSignature(str(error)) from error


def _target(request: Request) -> str:
    path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _fields(request: Request) -> dict[str, str]:
    """The header fields by lower-case name, lines of one name joined as RFC 9110 joins them."""
    found: dict[str, str] = {}
    for name, value in request.scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found
