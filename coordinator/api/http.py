"""Parts of HTTP that all routes share: bodies, messages, problem documents, and the middleware of both ports."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from typing import ParamSpec, TypeVar

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator import errors
from coordinator.api.authentication import demand_body
from coordinator.api.limits import DRAWN_AT_ONCE, Limits, admit
from coordinator.monitoring import REQUEST_ID, Metrics
from fedcore.errors import FedcoreError, RequestError, StaleSignature, WireError
from fedcore.wire import messages
from fedcore.wire.messages import PROBLEM_FIELD, PROBLEM_TYPE, PROBLEMS, URN, Problem, ProblemKind, RetryWindow, problem
from ingress.connection import RECEIVE_INTO, Body, ReceiveInto, memory_of
from ingress.limits import caller_of

T = TypeVar("T")
P = ParamSpec("P")
_LOG = logging.getLogger(__name__)
_WAIT = re.compile(r'(?:^|,)\s*wait\s*=\s*"?([0-9]{1,9})"?\s*(?:$|[,;])', re.IGNORECASE)
PROBLEM_OF = "muster.problem"
"""The key of a request's scope for the type of the problem document that answered it."""
ONWARD = "muster.onward"
"""The key of a request's scope for what passes it on to another replica, given its body, or None if that was not read.

Absent where the request is not another replica's.
"""
_SMALL_BYTES = 1 << 22
"""Up to here, work takes no more time than handing it to a thread."""
_SLUG_OF_STATUS = {404: "unknown-resource", 405: "method-not-allowed", 413: "too-large"}


async def in_thread_if_large(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` on `size` bytes gives: at once, or on a thread where the event loop would stand still meanwhile."""
    return work(*args, **kwargs) if size <= _SMALL_BYTES else await run_in_threadpool(work, *args, **kwargs)


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """The first header field of this name, in lower case."""
    for field, value in scope["headers"]:
        if field == name:
            found: bytes = value
            return found
    return None


async def read_body(request: Request, limit: int) -> memoryview:
    """The whole body of a signed request. Raises TooLarge; WrongBody when another body was signed."""
    body, digest = await read_hashed(request, limit)
    demand_body(request, digest)
    return body


async def read_hashed(request: Request, limit: int) -> tuple[memoryview, bytes]:
    """The whole body, in memory that is allocated once, and its SHA-256, computed as it comes. Raises TooLarge."""
    declared, first = _declared(request, limit), await request.receive()
    data = first.get("body", b"")
    if len(data) == declared > 0:  # small bodies come with their heads
        return memoryview(data), hashlib.sha256(data).digest()
    body = Body(memory_of(declared or limit))
    await read_into(body, request, limit, first)
    return body.data, body.digest()


async def read_into(body: Body, request: Request, limit: int, first: Message | None = None) -> None:
    """Receive a whole body into its memory of `limit` bytes. Raises TooLarge as soon as it is known to be larger.

    first: the message that was received already, if one was.
    """
    declared, receive_into = _declared(request, limit), request.scope.get(RECEIVE_INTO)
    body.expect(declared or limit)
    more = True
    while more:
        message, first = first or await request.receive(), None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if not body.append(message.get("body", b"")):
            raise _too_large(limit)
        more = message.get("more_body", False)
        if more and receive_into is not None and body.size < declared:
            more = not await receive_into(body)


def _declared(request: Request, limit: int) -> int:
    """Content-Length; 0 without one."""
    declared = int(header_of(request.scope, b"content-length") or 0)
    if declared > limit:
        raise _too_large(limit)
    return declared


def _too_large(limit: int) -> errors.TooLarge:
    return errors.TooLarge(f"this address takes at most {limit} bytes")


async def read_message(request: Request, kind: type[T], limit: int) -> T:
    """A message of the device protocol. Raises MalformedMessage or TooLarge."""
    return read_as(await read_body(request, limit), kind)


def read_as(data: memoryview, kind: type[T]) -> T:
    """A message of the device protocol. Raises MalformedMessage."""
    try:
        return messages.decode(bytes(data), kind)
    except WireError as error:
        raise errors.MalformedMessage(str(error)) from error


async def while_connected(request: Request, promise: Future[T] | asyncio.Future[T]) -> T:
    """The result of a promise, for a request whose body was read. Raises ClientDisconnect when its sender hangs up.

    The promise is cancelled in the end, unless it was kept.
    """
    kept, gone = asyncio.wrap_future(promise), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((kept, gone), return_when=asyncio.FIRST_COMPLETED)
        if not kept.done():
            raise ClientDisconnect
        return kept.result()
    finally:
        kept.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def preferred_wait(request: Request, cap_s: float) -> tuple[float, dict[str, str]]:
    """How long to wait by `Prefer: wait=N` (RFC 7240), at most `cap_s`, and the header that says so."""
    match = _WAIT.search(",".join(request.headers.getlist("prefer")))
    if match is None:
        return 0.0, {}
    wait_s = min(int(match[1]), math.floor(cap_s))
    return float(wait_s), {"Preference-Applied": f"wait={wait_s}"}


def answer(message: msgspec.Struct, headers: Mapping[str, str] | None = None) -> Response:
    """A message as JSON."""
    return Response(messages.encode(message), media_type="application/json", headers=headers)


def answer_problem(scope: Scope, document: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """A problem document; its type is noted in the request's scope."""
    scope[PROBLEM_OF] = document.slug
    fields = {**(headers or {}), PROBLEM_FIELD: document.slug}
    if document.retry is not None:
        fields["Retry-After"] = str(math.ceil(document.retry.min_s))
    return Response(messages.encode(document), document.status, fields, media_type=PROBLEM_TYPE)


def answer_refusal(scope: Scope, error: errors.Refusal | RequestError, retry: RetryWindow) -> Response:
    """The problem document of a refusal; one that may be tried again says when."""
    if isinstance(error, errors.TooManyRequests):
        retry = RetryWindow(error.wait_s, error.wait_s + retry.max_s)
    again = isinstance(error, errors.Refusal) and error.retriable
    document = problem(error.slug, str(error), retry if again else None)
    headers = _about(error) | ({"WWW-Authenticate": "Signature"} if document.status == 401 else {})
    return answer_problem(scope, document, headers)


def _about(error: errors.Refusal | RequestError) -> dict[str, str]:
    """The header fields that go with a refusal."""
    headers = {}
    if isinstance(error, errors.RangeNotSatisfiable):
        headers["Content-Range"] = f"bytes */{error.size}"
    if isinstance(error, errors.MismatchingOffset):
        headers |= {"Upload-Offset": str(error.size), "Upload-Complete": "?0"}
    if isinstance(error, StaleSignature) and error.after_s:
        headers["Retry-After"] = str(math.ceil(error.after_s))
    return headers


def answer_error(request: Request, error: Exception, retry: RetryWindow) -> Response:
    """The problem document of any error, the framework's own included."""
    match error:
        case errors.Refusal() | RequestError():
            return answer_refusal(request.scope, error, retry)
        case HTTPException():
            slug = _SLUG_OF_STATUS.get(error.status_code, "malformed-message")
            return answer_problem(request.scope, problem(slug, f"{request.method}: {error.detail}"), error.headers)
        case RequestValidationError():
            # The framework's own text has lines, and the path of the file that holds the route.
            wrong = "; ".join(f"{' '.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            return answer_problem(request.scope, problem("malformed-message", wrong))
        case ClientDisconnect():
            return answer_problem(request.scope, problem("malformed-message", "the body ended early"))
        case _:
            _LOG.error("unhandled %s", type(error).__name__)
            failed = problem("internal", "the coordinator failed; its log says why", retry)
            return answer_problem(request.scope, failed)


def install_problems(app: FastAPI, retry: RetryWindow) -> None:
    """Answer every error of a framework's application with a problem document."""

    async def answer_any(request: Request, error: Exception) -> Response:
        return answer_error(request, error, retry)

    for kind in (errors.Refusal, RequestError, HTTPException, RequestValidationError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer_any)


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
        overrun = errors.Unavailable("check-ins come faster than they are answered; come back later")
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
        except errors.MalformedMessage as refusal:
            await answer_refusal(scope, refusal, self._retry)(scope, receive, measured.send)
        except (errors.TooManyRequests, errors.Unavailable) as refusal:
            # Only the admission raises these: the application answers its own refusals.
            self._metrics.shed.labels("address" if isinstance(refusal, errors.TooManyRequests) else "connections").inc()
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
            raise errors.MalformedMessage("the path holds a NUL character")  # no name does, and PostgreSQL takes none
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
        REQUEST_ID.set(self._id)

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


# The problem types of the admin API. One table for both ends: the server answers with them, its client raises them.


_OWN: dict[str, tuple[type[Exception], int, str]] = {
    "bad-token": (errors.BadToken, 401, "The token is missing, unknown, revoked or expired"),
    "role-lacking": (errors.RoleLacking, 403, "The token's role does not allow this"),
    "unknown-task": (errors.UnknownTask, 404, "No task has this id"),
    "unknown-population": (errors.UnknownPopulation, 404, "No population has this name"),
    "no-such-device": (errors.UnknownDeviceId, 404, "No device has this id"),
    "unknown-round": (errors.UnknownRound, 404, "The task has no such round, or it was not committed"),
    "unknown-model": (errors.UnknownModel, 404, "No model has this name, or no such version was released"),
    "not-private": (errors.NotPrivate, 404, "The task promises no privacy"),
    "wrong-kind": (errors.WrongKind, 404, "A question has no model, and other tasks have no answer"),
    "task-ended": (errors.TaskEnded, 409, "The task is over, or not in a state that this starts from"),
    "keys-differ": (errors.KeysDiffer, 409, "The coordinator has another key than the task's release names"),
    "budget-exceeded": (errors.BudgetExceeded, 409, "The population's privacy budget has no room for this"),
    "invalid-budget": (errors.InvalidBudget, 422, "The population cannot have this privacy budget"),
    "invalid-task": (errors.InvalidTask, 422, "The settings contradict each other, or do not fit the bundle"),
    "invalid-model": (errors.InvalidModel, 422, "The model cannot be released or rolled out like this"),
    "webhook-failed": (errors.WebhookFailed, 409, "The webhook of alerts did not take an event, or none is set"),
    "invalid-bundle": (FedcoreError, 422, "The bundle is damaged, or its algorithm or signature is not good"),
}  # fmt: skip
"""Problem types that only the admin API has, each with the error that it stands for, its status and title."""
_SHARED = (
    "malformed-message", "unknown-resource", "method-not-allowed", "unknown-blob", "too-large", "digest-mismatch",
    "internal", "unavailable",
)  # fmt: skip
ADMIN_ERRORS = {slug: error for slug, (error, _, _) in _OWN.items()}
"""The errors that have a problem type of their own, by the type's name."""
ADMIN_PROBLEMS = {slug: ProblemKind(status, title) for slug, (_, status, title) in _OWN.items()}
ADMIN_PROBLEMS |= {slug: PROBLEMS[slug] for slug in _SHARED}
"""Every problem type of the admin API."""


def slug_of(error: Exception) -> str:
    """The name of the problem type of an error in ADMIN_ERRORS."""
    return next(slug for slug, kind in ADMIN_ERRORS.items() if isinstance(error, kind))


def install_admin_problems(app: FastAPI, retry: RetryWindow) -> None:
    """Make a problem document of the errors that the store and bundles raise."""

    async def refusal(request: Request, error: Exception) -> Response:
        slug = slug_of(error)
        kind = ADMIN_PROBLEMS[slug]
        headers = {"WWW-Authenticate": "Bearer"} if kind.status == 401 else {}
        return answer_problem(request.scope, Problem(URN + slug, kind.title, kind.status, str(error)), headers)

    async def conflict(request: Request, error: Exception) -> Response:
        return answer_refusal(request.scope, errors.Unavailable(str(error)), retry)

    for kind in ADMIN_ERRORS.values():
        app.add_exception_handler(kind, refusal)
    app.add_exception_handler(errors.StoreConflict, conflict)
