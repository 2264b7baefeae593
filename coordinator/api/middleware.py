"""Middleware of both ports: request ids for the log, limits, metrics."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.connection import FILL, Body, Fill
from coordinator.api.http import PROBLEM_OF, answer_refusal
from coordinator.api.limits import Limits, caller_of
from coordinator.errors import MalformedMessage, TooManyRequests, Unavailable
from coordinator.metrics import Metrics
from fedcore.wire.messages import RetryWindow

_LOG = logging.getLogger(__name__)
_ASSIGNMENT = re.compile("/v1/assignments/([^/:]+)")
_OPEN = ("/healthz", "/readyz")
"""Paths that no limit shuts: a supervisor must hear that the service lives when it is busiest."""
SILENCE_S = 60.0
"""How long a body may pause. A device that lost its network says no goodbye, and what it holds here is others' too."""


class RequestMiddleware:
    """ASGI: measures every request, and with limits turns away what is too much before it is read or routed.

    of_replica: whether another replica passed a request on: then the limit of its address was applied there.
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
        # Made once, and counted by this alone: what is sent away by the thousand must cost next to nothing.
        overrun = Unavailable("check-ins come faster than they are answered; come back later")
        self._overrun = answer_refusal({}, overrun, retry)
        self._overruns = metrics.shed.labels("check-ins")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 400, 429 or 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._limits is not None and scope["path"].endswith("/checkins") and self._limits.shedder.too_late():
            self._overruns.inc()
            await self._overrun(scope, receive, send)
            return
        visit = _Visit(scope, receive, send)
        try:
            with self._admission(scope):
                await self._app(scope, visit.receive, visit.send)
        except MalformedMessage as refusal:
            await answer_refusal(scope, refusal, self._retry)(scope, receive, visit.send)
        except (TooManyRequests, Unavailable) as refusal:
            # Only the admission raises these: the application makes its own answers of its own.
            self._metrics.shed.labels("address" if isinstance(refusal, TooManyRequests) else "connections").inc()
            found = _ASSIGNMENT.match(scope["path"])
            if self._limits is not None and found is not None:
                # The device is there, though there is no room for it. Nobody else knows the assignment's id.
                self._limits.sent_away(found[1])
            await answer_refusal(scope, refusal, self._retry)(scope, receive, visit.send)
        finally:
            visit.record(self._metrics)

    def _admission(self, scope: Scope) -> AbstractContextManager[None]:
        """Raises MalformedMessage, TooManyRequests or Unavailable."""
        if "\0" in scope["path"]:
            raise MalformedMessage("the path holds a NUL character")  # no name does, and PostgreSQL takes none
        if self._limits is None or scope["path"] in _OPEN:
            return nullcontext()
        caller = caller_of(scope["client"][0]) if scope.get("client") else None
        if caller is not None and not self._of_replica(scope):
            self._limits.address.admit(caller)
        return self._limits.connections.hold()


class _Visit:
    """One request as it is read and answered: bytes, status, time. Whoever falls silent in a body has hung up."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._began = time.perf_counter()
        self._received = self._sent = 0
        self._status = 500
        self._whole = False
        if FILL in scope:
            self._fill: Fill = scope[FILL]
            scope[FILL] = self.fill
        self._id = f"{random.getrandbits(32):08x}"
        structlog.contextvars.bind_contextvars(request_id=self._id)

    async def receive(self) -> Message:
        if self._whole:
            # Behind its body a request has nothing to say but goodbye, which may take as long as the answer.
            return await self._receive()
        try:
            async with asyncio.timeout(SILENCE_S):
                message = await self._receive()
        except TimeoutError:
            message = {"type": "http.disconnect"}
        self._whole = not message.get("more_body", False)
        self._received += len(message.get("body", b""))
        return message

    async def fill(self, body: Body) -> bool:
        before, filling = body.size, asyncio.ensure_future(self._fill(body))
        try:
            while not filling.done():
                silent_s = time.monotonic() - body.grew_at
                if silent_s >= SILENCE_S:
                    raise ClientDisconnect
                await asyncio.wait((filling,), timeout=SILENCE_S - silent_s)
            self._whole = filling.result()
            return self._whole
        finally:
            filling.cancel()
            self._received += body.size - before

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message.setdefault("headers", []).append((b"x-request-id", self._id.encode()))
        self._sent += len(message.get("body", b""))
        await self._send(message)

    def record(self, metrics: Metrics) -> None:
        # The route's pattern, never the path: a path holds ids that are secrets, and without end of them.
        route = getattr(self._scope.get("route"), "path", "none")
        seconds = time.perf_counter() - self._began
        metrics.requested(route, self._status, seconds, self._received, self._sent)
        if PROBLEM_OF in self._scope:
            metrics.problems.labels(route, self._scope[PROBLEM_OF]).inc()
        if _LOG.isEnabledFor(logging.DEBUG):
            found = {"route": route, "status": self._status, "milliseconds": round(seconds * 1e3, 1)}
            _LOG.debug("request", extra=found)
