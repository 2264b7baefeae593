"""Authentication of devices: every request is signed, and its signature is checked before the body is read.

Spec: docs/spec/wire.md §10.
"""

from __future__ import annotations

import time

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from coordinator.api.limits import admit
from coordinator.api.lru_cache import LruCache
from coordinator.api.replays import Replays
from coordinator.errors import DeviceRevoked, TooManyRequests, Unavailable, UnknownDevice
from coordinator.metrics import Metrics
from coordinator.rules.entities import Device
from coordinator.store.tasks import CoordinatorStore
from fedcore.wire.signatures import PublicKey, SignableRequest, Signature
from ingress.limits import RateLimit
from ingress.signed_requests import Signed, named_key, read, signer_of

KEYS = 1 << 16
"""Public keys kept in memory, at about 600 bytes each."""
REQUESTS = 1 << 20
"""The most signatures that are remembered, for five minutes each."""
_SIGNED = "muster.signed"


class Authenticator:
    """Checks signatures. Its methods run before a route's endpoint, and keep the signer in the request's scope.

    limit: how often a device may ask, which also bounds its share of what is remembered.
    """

    def __init__(self, store: CoordinatorStore, limit: RateLimit, metrics: Metrics) -> None:
        self._store = store
        self._limit = limit
        self._metrics = metrics
        self._keys: LruCache[str, tuple[PublicKey, float]] = LruCache(KEYS)
        self._replays = Replays(REQUESTS)
        self._revoked: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Begin to answer, or to answer for more: signatures that another process may have accepted are refused."""
        self._replays.begin(time.time(), time.monotonic())

    def refuse(self, devices: frozenset[str]) -> None:
        """Refuse exactly these devices from now on, whose keys may be in memory. From any thread."""
        self._revoked = devices

    async def device(self, request: Request) -> None:
        """Demand an enrolled device's signature.

        Raises RequestError, UnknownDevice, ReplayedSignature, DeviceRevoked, TooManyRequests or Unavailable.
        """
        signature, about = self._read(request)
        key, since = self._keys.get(signature.keyid) or await self._find(signature.keyid)
        signer = signer_of(signature, about, key)
        if signature.keyid in self._revoked:
            raise DeviceRevoked
        self._replays.demand_new(signature, since, time.time(), time.monotonic())
        self._admit(signature)
        request.scope[_SIGNED] = signer

    async def new_device(self, request: Request) -> None:
        """Demand the signature of a key that names itself. Raises RequestError.

        These are not remembered: enrolling twice changes nothing, and anybody can make keys and fill the memory.
        """
        signature, about = self._read(request)
        request.scope[_SIGNED] = signer_of(signature, about, named_key(signature))

    def _admit(self, signature: Signature) -> None:
        """Count a device's own request; replays by others do not count against it."""
        try:
            admit(self._limit, signature.keyid)
            self._replays.remember(signature)
        except (TooManyRequests, Unavailable) as refusal:
            self._metrics.shed.labels("device" if isinstance(refusal, TooManyRequests) else "signatures").inc()
            raise

    def _read(self, request: Request) -> tuple[Signature, SignableRequest]:
        """The signature of a request, which is fresh and covers all that it must."""
        signature, about = read(request)
        signature.check_time(time.time())
        return signature, about

    async def _find(self, device: str) -> tuple[PublicKey, float]:
        enrolled = await run_in_threadpool(self._look_up, device)
        return self._keys.put(device, (PublicKey.parse(enrolled.key), enrolled.enrolled_at))

    def _look_up(self, device: str) -> Device:
        with self._store.database.reading() as records:
            enrolled = records.devices.find(device)
        if enrolled is None:
            raise UnknownDevice("no device has this id here; enrol")
        demand_allowed(enrolled)
        return enrolled


def demand_allowed(device: Device) -> None:
    """Raise DeviceRevoked for a device that an operator has revoked."""
    if device.revoked_at is not None:
        raise DeviceRevoked


def signed(request: Request) -> Signed:
    """The signer of a request that an Authenticator has checked."""
    signer: Signed = request.scope[_SIGNED]
    return signer


def demand_body(request: Request, sha256: bytes) -> None:
    """Raise WrongBody unless a body with this SHA-256 is the one that was signed."""
    signed(request).check(sha256)
