"""The channel on which replicas tell drivers what they sum, and the shares that go over it.

Spec: docs/spec/rounds.md §5. A request proves with a key that all replicas have that one of them sent it, and its
target has the digest of its body.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Set as AbstractSet
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx2
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.api.http import answer_error, in_thread_if_large, read_into
from coordinator.api.service import Service
from coordinator.commands import TakeShare
from coordinator.driver.replica_membership import Membership
from coordinator.errors import MalformedMessage
from coordinator.failpoints import reach
from coordinator.rules.replicas import decode_shares, encode_shares
from ingress.connection import Body, memory_of

_LOG = logging.getLogger(__name__)
FORWARDED = b"muster-forwarded"
_ROUTE = SimpleNamespace(path="shares of a replica")
_TIMES = httpx2.Timeout(30.0, connect=2.0, pool=2.0)
Take: TypeAlias = Callable[[Service, memoryview], Awaitable[Response]]
"""Takes the body of a request, and answers once what it says is done."""


def proof_of(key: bytes, method: str, target: bytes, replica: str) -> bytes:
    """The proof that a replica sent a request to `replica`."""
    return hmac.digest(key, b" ".join((method.encode(), target, replica.encode())), "sha256").hex().encode()


async def wait_while_there(replica: str, membership: Membership, promises: AbstractSet[asyncio.Future[Any]]) -> None:
    """Return when one of `promises` is kept. Raises httpx2.ReadTimeout when `replica` is taken for gone before."""
    # Rarer than the directory changes, and rare enough for ten thousand that wait.
    look_s = max(0.5, membership.lease_s / 3)
    while not (await asyncio.wait(promises, timeout=look_s, return_when=asyncio.FIRST_COMPLETED))[0]:
        if replica not in membership.directory.urls:
            raise httpx2.ReadTimeout("it is taken for gone")


class ReplicaChannel:
    """Requests of this replica to others."""

    def __init__(self, service: Service) -> None:
        self._membership = service.membership
        self._keys = service.keys
        self._client: httpx2.AsyncClient | None = None

    async def post(self, replica: str, path: str, body: bytes) -> bytes | None:
        """The answer of a replica; None, and a line in the log, if it is gone, cannot be reached or refuses."""
        url = self._membership.directory.urls.get(replica)
        if url is None:
            return None
        digest = await in_thread_if_large(len(body), hashlib.sha256, body)
        target = f"{path}?sha256={digest.hexdigest()}".encode()
        proof = proof_of(self._keys.between_replicas, "POST", target, replica)
        headers = [(b"content-type", b"application/octet-stream"), (FORWARDED, proof)]
        extensions = {"target": urlsplit(url).path.rstrip("/").encode() + target}
        sending = self._opened().post(url, content=body, headers=headers, extensions=extensions)
        answering = asyncio.ensure_future(sending)
        try:
            await wait_while_there(replica, self._membership, {answering})
            answered = answering.result()
        except httpx2.TransportError as error:
            _LOG.warning("replica %s cannot be told of reports: %s", replica, type(error).__name__)
            return None
        finally:
            answering.cancel()
        if not answered.is_success:
            _LOG.warning("replica %s took no shares: %s", replica, answered.text[:200])
            return None
        return answered.content

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    def _opened(self) -> httpx2.AsyncClient:
        if self._client is None:
            # As for what is forwarded: the system says which authorities are trusted, and no proxy is used.
            self._client = httpx2.AsyncClient(verify=ssl.create_default_context(), trust_env=False, timeout=_TIMES)
        return self._client


async def answer_replica(service: Service, take: Take, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer another replica's request, in memory that is reserved as for reports."""
    scope["route"] = _ROUTE
    request = Request(scope, receive, send)
    try:
        size = int(request.headers.get("content-length", "0"))
        with service.limits.reports.reserve(size):
            body = Body(memory_of(size))
            await read_into(body, request, size)
            if body.digest().hex() != request.query_params.get("sha256"):
                raise MalformedMessage("the body of these shares is another than was sent")
            answer = await take(service, body.data)
    except Exception as error:
        answer = answer_error(request, error, service.settings.soon)
    await answer(scope, receive, send)


SHARES = "/replicas/shares"
_EVERY_S, _LOOK_S = 0.4, 0.05
_BEAT_S = 1.0
"""How often a driver hears, at least, of a replica that sums reports for it."""
_LAST_S = 2.0
"""How long a process that stops waits until drivers have its sums."""


class ShareSender:
    """Tells the drivers of rounds which reports came here, and hands over the sums."""

    def __init__(self, service: Service, channel: ReplicaChannel) -> None:
        self._membership = service.membership
        self._channel = channel
        self._sums = service.driver.shared
        self._sent: dict[str, float] = {}
        self._busy: set[str] = set()

    async def send_forever(self) -> None:
        """Send what is new, a few times a second, and sums at once. What did not arrive is sent again.

        A driver that does not answer holds up no other.
        """
        async with asyncio.TaskGroup() as sending:
            while True:
                until = time.monotonic() + _EVERY_S
                while time.monotonic() < until and not self._sums.closing - self._busy:
                    await asyncio.sleep(_LOOK_S)
                for driver in self._sums.drivers - self._busy:
                    self._busy.add(driver)
                    sending.create_task(self._send(driver))
                await asyncio.sleep(_LOOK_S)

    async def send_last(self) -> None:
        """Return once drivers have all that `send_forever` sends, as this process ends; but soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                while self._sums.wait:
                    await asyncio.sleep(_LOOK_S)

    async def _send(self, driver: str) -> None:
        now = time.monotonic()
        try:
            if driver not in self._membership.directory.urls:  # who takes its populations abandons the rounds
                return
            message, sums = self._sums.news(self._membership.id, driver)
            if not message.shares and now < self._sent.get(driver, 0.0) + _BEAT_S:
                return
            if sums:
                reach("sum.before-hand-over")
            body = await in_thread_if_large(sum(one.nbytes for one in sums), encode_shares, message, sums)
            if await self._channel.post(driver, SHARES, body) is not None:
                self._sums.heard(message)
                self._sent = {one: at for one, at in self._sent.items() if now < at + _BEAT_S} | {driver: now}
        except Exception as error:
            _LOG.error("sums could not be handed over: %s", error)
        finally:
            self._busy.discard(driver)


async def take_shares(service: Service, data: memoryview) -> Response:
    """Answer a replica that has told of reports, or hands sums over, once that is committed."""
    shares, sums = await in_thread_if_large(len(data), decode_shares, data)
    service.driver.heard_of(shares.replica)
    for assignment in shares.present:
        service.driver.presence.heard(assignment)
    taken = [
        service.driver.submit(TakeShare(shares.replica, share, total))
        for share, total in zip(shares.shares, sums, strict=True)
    ]
    await asyncio.gather(*(asyncio.wrap_future(one) for one in taken))
    return Response(status_code=204)
