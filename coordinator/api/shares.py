"""The channel on which replicas hand sums to the drivers of rounds, memory to memory. Spec: docs/spec/rounds.md §5.

A request proves with a key that all replicas have that one of them sent it, and its target has the digest of its body.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx2
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.api.http import answer_error, read_into
from coordinator.api.service import Service
from coordinator.commands import TakeShare
from coordinator.errors import MalformedMessage
from coordinator.failpoints import reach
from coordinator.rules.shared_sums import Shares, decode_shares, encode_shares
from ingress.connection import Body, memory_of

_LOG = logging.getLogger(__name__)
FORWARDED = b"muster-forwarded"
SHARES = "/replicas/shares"
_ROUTE = SimpleNamespace(path="shares of a replica")
_EVERY_S, _LOOK_S = 0.4, 0.05
_BEAT_S = 1.0
"""How often a driver hears, at least, of a replica that sums reports for it."""
_TIMES = httpx2.Timeout(30.0, connect=2.0, pool=2.0)
_LAST_S = 2.0
"""How long a process that stops waits until drivers have its sums."""


def proof_of(key: bytes, method: str, target: bytes, replica: str) -> bytes:
    """The proof that a replica sent a request to `replica`."""
    return hmac.digest(key, b" ".join((method.encode(), target, replica.encode())), "sha256").hex().encode()


class ShareSender:
    """Tells the drivers of rounds which reports came here, and hands over the sums."""

    def __init__(self, service: Service) -> None:
        self._membership = service.membership
        self._keys = service.keys
        self._sums = service.driver.shared
        self._sent: dict[str, float] = {}

    async def send_forever(self) -> None:
        """Send what is new, a few times a second, and sums at once. What did not arrive is sent again."""
        try:
            while True:
                until = time.monotonic() + _EVERY_S
                while time.monotonic() < until and not self._sums.closing:
                    await asyncio.sleep(_LOOK_S)
                try:
                    await self._send_all()
                except Exception as error:
                    _LOG.error("sums could not be handed over: %s", error)
                await asyncio.sleep(_LOOK_S)
        finally:
            await self._client.aclose()

    async def send_last(self) -> None:
        """Return once drivers have all that `send_forever` sends, as this process ends; but soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                while self._sums.wait:
                    await asyncio.sleep(_LOOK_S)

    @functools.cached_property
    def _client(self) -> httpx2.AsyncClient:
        # As for what is forwarded: the system says which authorities are trusted, and no proxy is used.
        return httpx2.AsyncClient(verify=ssl.create_default_context(), trust_env=False, timeout=_TIMES)

    async def _send_all(self) -> None:
        for driver, (message, sums) in self._sums.news(self._membership.id).items():
            url, now = self._membership.directory.urls.get(driver), time.monotonic()
            if url is None:  # who takes its populations abandons the rounds
                continue
            if not message.shares and now < self._sent.get(driver, 0.0) + _BEAT_S:
                continue
            if sums:
                reach("sum.before-hand-over")
            if await self._send(driver, url, encode_shares(message, sums)):
                self._sums.heard(message)
                self._sent = {one: at for one, at in self._sent.items() if now < at + _BEAT_S} | {driver: now}

    async def _send(self, driver: str, url: str, body: bytes) -> bool:
        target = f"{SHARES}?sha256={hashlib.sha256(body).hexdigest()}".encode()
        proof = proof_of(self._keys.between_replicas, "POST", target, driver)
        path = urlsplit(url).path.rstrip("/").encode()
        try:
            headers = [(b"content-type", b"application/octet-stream"), (FORWARDED, proof)]
            answered = await self._client.post(url, content=body, headers=headers, extensions={"target": path + target})
        except httpx2.TransportError as error:
            _LOG.warning("replica %s cannot be told of reports: %s", driver, type(error).__name__)
            return False
        if answered.status_code != 204:
            _LOG.warning("replica %s took no shares: %s", driver, answered.text[:200])
        return answered.status_code == 204


async def take_shares(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a replica that has told of reports, or hands sums over, once that is committed."""
    scope["route"] = _ROUTE
    request = Request(scope, receive, send)
    try:
        await _take(service, request)
    except Exception as error:
        await answer_error(request, error, service.settings.soon)(scope, receive, send)
    else:
        await Response(status_code=204)(scope, receive, send)


async def _take(service: Service, request: Request) -> None:
    size = int(request.headers.get("content-length", "0"))
    with service.limits.reports.reserve(size):
        body = Body(memory_of(size))
        await read_into(body, request, size)
        if body.digest().hex() != request.query_params.get("sha256"):
            raise MalformedMessage("the body of these shares is another than was sent")
        shares, sums = decode_shares(body.data)
        await _submit(service, shares, sums)


async def _submit(service: Service, shares: Shares, sums: Sequence[NDArray[np.float64] | None]) -> None:
    service.driver.heard_of(shares.replica)
    for assignment in shares.present:
        service.driver.presence.heard(assignment)
    taken = [
        service.driver.submit(TakeShare(shares.replica, share, total))
        for share, total in zip(shares.shares, sums, strict=True)
    ]
    await asyncio.gather(*(asyncio.wrap_future(one) for one in taken))
