"""Middleware of both ports: request ids for the log, limits, metrics."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.http import PROBLEM_OF, answer_refusal
from coordinator.api.limits import DRAWN_AT_ONCE, Limits, admit
from coordinator.errors import MalformedMessage, TooManyRequests, Unavailable
from coordinator.metrics import Metrics
from fedcore.wire.messages import RetryWindow
from ingress.connection import RECEIVE_INTO, Body, ReceiveInto
from ingress.limits import caller_of

_LOG = logging.getLogger(__name__)
_ASSIGNMENT = re.compile("/v1/assignments/([^/:]+)")
_OPEN = ("/healthz", "/readyz")
"""Paths without limits: a supervisor must get an answer from a busy service too."""


class RequestMiddleware:
    """ASGI: measures every request, and refuses those beyond the limits before they are read or routed.

    of_replica: whether another replica forwarded a request: then the limit of its address was applied there.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        retry: RetryWindow,
        limits: Limits | None = None,
        of_replica: Callable[[Scope], bool] = lambda _: False,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._retry = retry
        self._limits = limits
        self._of_replica = of_replica
        # Made once, and counted by one metric only: a refusal must cost next to nothing when there are thousands.
        overrun = Unavailable("check-ins come faster than they are answered; come back later")
        self._overrun = answer_refusal({}, overrun, retry)
        self._overruns = metrics.shed.labels("check-ins")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 400, 429 or 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._limits is not None and scope["path"].endswith("/checkins") and self._limits.shedder.must_shed():
            self._overruns.inc()
            await self._overrun(scope, receive, send)
            return
        measured = _MeasuredRequest(scope, receive, send)
        try:
            with self._admission(scope):
                await self._app(scope, measured.receive, measured.send)
        except MalformedMessage as refusal:
            await answer_refusal(scope, refusal, self._retry)(scope, receive, measured.send)
        except (TooManyRequests, Unavailable) as refusal:
            # Only the admission raises these: the application answers its own refusals.
            self._metrics.shed.labels("address" if isinstance(refusal, TooManyRequests) else "connections").inc()
            match = _ASSIGNMENT.match(scope["path"])
            if self._limits is not None and match is not None:
                # The device is present, though it was refused. Nobody else knows the assignment's id.
                self._limits.sent_away(match[1])
            await answer_refusal(scope, refusal, self._retry)(scope, receive, measured.send)
        finally:
            measured.record(self._metrics)

    def _admission(self, scope: Scope) -> AbstractContextManager[None]:
        """Raises MalformedMessage, TooManyRequests or Unavailable."""
        if "\0" in scope["path"]:
            raise MalformedMessage("the path holds a NUL character")  # no name does, and PostgreSQL takes none
        if self._limits is None or scope["path"] in _OPEN:
            return nullcontext()
        caller = caller_of(scope["client"][0]) if scope.get("client") else None
        if caller is not None and self._of_replica(scope):
            caller = None
        if caller is not None:
            admit(self._limits.address, caller)
        return self._limits.connections.hold(caller)


class FewAtOnce:
    """ASGI: makes the answers to few GET requests of a port at a time; the others wait for their turn.

    A turn ends when an answer begins to be sent: its reader may take long.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = asyncio.Semaphore(DRAWN_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, once it is its turn."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] in _OPEN:
            await self._app(scope, receive, send)
            return
        async with AsyncExitStack() as turn:

            async def send_after_turn(message: Message) -> None:
                await turn.aclose()
                await send(message)

            await turn.enter_async_context(self._turns)
            await self._app(scope, receive, send_after_turn)


class _MeasuredRequest:
    """The bytes, status and time of a request while it is read and answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._began = time.perf_counter()
        self._received = self._sent = 0
        self._status = 500
        if RECEIVE_INTO in scope:
            self._receive_into: ReceiveInto = scope[RECEIVE_INTO]
            scope[RECEIVE_INTO] = self.receive_into
        self._id = f"{random.getrandbits(32):08x}"
        structlog.contextvars.bind_contextvars(request_id=self._id)

    async def receive(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        return message

    async def receive_into(self, body: Body) -> bool:
        before = body.size
        try:
            return await self._receive_into(body)
        finally:
            self._received += body.size - before

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message.setdefault("headers", []).append((b"x-request-id", self._id.encode()))
        self._sent += len(message.get("body", b""))
        await self._send(message)

    def record(self, metrics: Metrics) -> None:
        # The route's pattern, never the path: a path holds ids, which are secret and too many for labels.
        route = getattr(self._scope.get("route"), "path", "none")
        seconds = time.perf_counter() - self._began
        metrics.requested(route, self._status, seconds, self._received, self._sent)
        if PROBLEM_OF in self._scope:
            metrics.problems.labels(route, self._scope[PROBLEM_OF]).inc()
        if _LOG.isEnabledFor(logging.DEBUG):
            facts = {"route": route, "status": self._status, "milliseconds": round(seconds * 1e3, 1)}
            _LOG.debug("request", extra=facts)
