"""Forwarding of devices' requests to the replica that must answer them. Spec: docs/spec/rounds.md §5.

A session or an assignment lives in the process that made it and is named after it; a check-in goes to the process that
drives its population, unless this one can turn the device away. Everything else is in the database, and any replica
answers it.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import re
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterable, Set as AbstractSet
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.http import ONWARD, answer_refusal, header_of
from coordinator.api.masked_exchange import (
    FORWARDED,
    MASKED,
    SHARES,
    answer_replica,
    proof_of,
    take_masked,
    take_shares,
    wait_while_there,
)
from coordinator.api.service import Service
from coordinator.errors import Refusal, Unavailable
from coordinator.rules.replicas import maker_of

_LOG = logging.getLogger(__name__)
_POPULATION = re.compile(r"/v1/populations/([^/]+)/checkins")
_REPORT = re.compile(r"[A-Z]+ /v1/assignments/[^/:]+/report|PUT /v1/assignments/[^/:]+/secagg/7")
"""What may be taken here for a driver elsewhere: reports, and masked ones."""
_MADE = re.compile(r"/v1/(?:sessions|assignments)/([^/:]+)(?:[/:].*)?")
_HEALTH = ("/healthz", "/readyz")
# Header fields of one connection only (RFC 9110 §7.6.1), or set by every server itself.
_OF_ONE_HOP = frozenset({b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"})
_OF_EVERY_SERVER = _OF_ONE_HOP | {b"date", b"server"}
_CONNECT_S, _SLACK_S = 2.0, 30.0
_MOST_SHARED = 100
_FROM_REPLICAS = {SHARES: take_shares, MASKED: take_masked}
_FORWARDED_ROUTE = SimpleNamespace(path="another replica")
"""The route of a forwarded request in metrics."""
_KEPT_S = 2.0
"""How long an idle connection is kept: shorter than the other side keeps it, so that none is used as it closes."""


class Router:
    """ASGI middleware in front of the device API of one replica.

    A request for another replica is forwarded, once, with path, Host and all headers as they came, and its answer is
    passed back. A secret that all replicas have proves that one of them forwarded a request.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        settings = service.settings
        self._app = app
        self._service = service
        self._driver = service.driver
        self._membership = service.membership
        self._keys = service.keys
        self._retry = settings.soon
        self._answers_devices = settings.role != "driver"
        self._longest_s = settings.max_wait_s + _SLACK_S
        self._shared: httpx2.AsyncClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer here or elsewhere."""
        if scope["type"] != "http":
            try:
                await self._app(scope, receive, send)
            finally:
                if self._shared is not None:
                    await self._shared.aclose()
            return
        take, proof = _FROM_REPLICAS.get(scope["path"]), header_of(scope, FORWARDED)
        forwarded = proof is not None and self._proves(proof, scope)
        if take is not None and forwarded:
            await answer_replica(self._service, take, scope, receive, send)
        elif forwarded or scope["path"] in _HEALTH:
            await self._app(scope, receive, send)
        elif proof is not None:
            # Forged, or made with a key that is being succeeded right now: then the next try succeeds.
            await self._refuse(Unavailable("Muster-Forwarded is for replicas that have this one's key"), scope, send)
        elif not self._answers_devices:
            await self._refuse(Unavailable("this replica answers only other replicas"), scope, send)
        elif (replica := await self._other_replica(scope["path"])) is None:
            await self._app(scope, receive, send)
        elif _REPORT.fullmatch(f"{scope['method']} {scope['path']}") or (
            (match := _POPULATION.fullmatch(scope["path"])) and self._driver.follows(match[1])
        ):
            scope[ONWARD] = functools.partial(self._pass_on, replica)
            await self._app(scope, receive, send)
        else:
            await self._forward(replica, scope, receive, send)

    def _pass_on(self, to: tuple[str, str], body: bytes | None) -> ASGIApp:
        """The answer of another replica to a request whose body was read, or was not (None)."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            read: list[Message] = [] if body is None else [{"type": "http.request", "body": body}]

            async def again() -> Message:
                return read.pop() if read else await receive()

            await self._forward(to, scope, again, send)

        return answer

    def is_forwarded(self, scope: Scope) -> bool:
        """Whether another replica forwarded a request to this one, with a good proof."""
        proof = header_of(scope, FORWARDED)
        return proof is not None and self._proves(proof, scope)

    def _proves(self, proof: bytes, scope: Scope) -> bool:
        return hmac.compare_digest(proof, self._proof(scope, self._membership.id))

    async def _other_replica(self, path: str) -> tuple[str, str] | None:
        """Id and URL of the replica that must answer; None for this one, or when the other one is gone."""
        directory = self._membership.directory
        if match := _POPULATION.fullmatch(path):
            replica = directory.holders.get(match[1], "")
        elif match := _MADE.fullmatch(path):
            replica = maker_of(match[1])
        else:
            return None
        if not replica or replica == self._membership.id:
            return None
        url = directory.urls.get(replica)
        if url is None:
            # It may be too new for this process to have seen it. Otherwise it is gone, and the database knows the rest.
            url = (await run_in_threadpool(self._membership.read_directory)).urls.get(replica)
        return None if url is None else (replica, url)

    async def _forward(self, to: tuple[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = _FORWARDED_ROUTE
        replica, url = to
        body = _ForwardedBody(scope, receive)
        async with self._connections(scope["path"]) as client:
            request = client.build_request(
                scope["method"],
                url,
                headers=[*_headers_without(scope["headers"], _OF_ONE_HOP), (FORWARDED, self._proof(scope, replica))],
                content=body if body.present else None,
                extensions={"target": urlsplit(url).path.rstrip("/").encode() + _target(scope)},
            )
            try:
                response = await self._answer(client.send(request, stream=True), body, replica)
            except (httpx2.TransportError, ClientDisconnect) as error:
                _LOG.warning("replica %s cannot be reached: %s", replica, type(error).__name__)
                gone = Unavailable("the replica that this is for cannot be reached; ask again")
                await self._refuse(gone, scope, send)
            else:
                if response is not None:
                    await _return_answer(response, send)

    @asynccontextmanager
    async def _connections(self, path: str) -> AsyncIterator[httpx2.AsyncClient]:
        """Connections for a request: shared ones when it is answered at once, as a check-in is, else its own.

        The time that a pool spends on a request grows with the requests in it: with 3,000 that wait it is 50 ms.
        """
        if _POPULATION.fullmatch(path):
            self._shared = self._shared or self._client()
            yield self._shared
            return
        async with self._client() as client:
            yield client

    @functools.cached_property
    def _trusted(self) -> ssl.SSLContext:
        """The authorities that the system trusts. Read when the first request is forwarded: it takes some 20 ms."""
        return ssl.create_default_context()

    def _client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            verify=self._trusted,
            trust_env=False,  # a proxy that the environment names is meant for other traffic
            timeout=httpx2.Timeout(_SLACK_S, connect=_CONNECT_S, pool=_CONNECT_S, read=self._longest_s),
            limits=httpx2.Limits(max_connections=_MOST_SHARED, keepalive_expiry=_KEPT_S),
        )

    async def _answer(
        self, sending: Coroutine[Any, Any, httpx2.Response], body: _ForwardedBody, replica: str
    ) -> httpx2.Response | None:
        """The other replica's answer; None when the device hung up, and then the connection is closed there too.

        Raises httpx2.TransportError, also when the other replica is declared gone while its answer is awaited;
        ClientDisconnect.
        """
        answering, leaving = asyncio.ensure_future(sending), asyncio.ensure_future(body.disconnected())
        try:
            await wait_while_there(replica, self._membership, {answering, leaving})
            return await answering if answering.done() else None
        finally:
            answering.cancel()
            leaving.cancel()

    def _proof(self, scope: Scope, replica: str) -> bytes:
        """The proof that a replica forwarded a request to `replica`."""
        return proof_of(self._keys.between_replicas, scope["method"], _target(scope), replica)

    async def _refuse(self, refusal: Refusal, scope: Scope, send: Send) -> None:
        await answer_refusal(scope, refusal, self._retry)(scope, _nothing, send)


async def _nothing() -> Message:
    raise AssertionError("a refusal reads nothing")


class _ForwardedBody:
    """The body of a request that is forwarded piece by piece, and the disconnect of its sender."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = dict(scope["headers"])
        self.present = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        self._receive = receive
        self._read = asyncio.Event()
        if not self.present:
            self._read.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            more = message.get("more_body", False)
            yield message.get("body", b"")
        self._read.set()

    async def disconnected(self) -> None:
        """Return when the sender hangs up after its body."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _return_answer(response: httpx2.Response, send: Send) -> None:
    headers = _headers_without(response.headers.raw, _OF_EVERY_SERVER)
    try:
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        async for chunk in response.aiter_raw():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})
    except httpx2.TransportError:
        # The server closes the connection, as the answer is unfinished.
        _LOG.warning("another replica's answer broke off")
    finally:
        await response.aclose()


def _headers_without(headers: Iterable[tuple[bytes, bytes]], but: AbstractSet[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in but]


def _target(scope: Scope) -> bytes:
    path: bytes = scope["raw_path"]
    return path + b"?" + scope["query_string"] if scope["query_string"] else path
