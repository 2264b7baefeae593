"""The device API: its endpoints, and the table of its routes, all authenticated. Spec: docs/spec/wire.md.

`DeviceRouter` matches requests by it, and the OpenAPI document is made from it.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator import commands
from coordinator.api.authentication import Authenticator, LruCache, demand_body, signed
from coordinator.api.devices.blobs import REMEMBERED, AssignmentAccess, Deltas, HeldAnswer, serve_blob
from coordinator.api.devices.reports import HEADER_BYTES, ReportApi, Senders
from coordinator.api.http import (
    ONWARD,
    answer,
    answer_error,
    preferred_wait,
    read_as,
    read_body,
    read_hashed,
    read_message,
    while_connected,
)
from coordinator.api.masked_exchange import MaskedExchange
from coordinator.api.openapi import ANYWHERE, BYTES, EXAMPLES, Answer, ApiDocument
from coordinator.api.service import Service
from coordinator.errors import MalformedMessage, NoModel, Refusal, UnknownBlob
from coordinator.rules.replicas import round_in
from coordinator.rules.selection import Eligibility
from fedcore.errors import RequestError
from fedcore.labels import check_labels
from fedcore.plan import BlobRef
from fedcore.report import ReportLayout
from fedcore.wire import messages
from fedcore.wire.messages import PROBLEMS
from ingress.connection import hang_up
from secagg.encoding import MessageType

# The endpoints of the device API, masked reports for other replicas among them. Spec: docs/spec/wire.md.


_ROUNDS = 1 << 8


def most_bytes(layout: ReportLayout) -> int:
    """The longest masked report: at most half a word per value, and a word for each segment and the checks."""
    return 4 * layout.size + 8 * len(layout.segments) + HEADER_BYTES


class MaskedReports:
    """The endpoint for masked reports that this replica adds for a driver elsewhere."""

    def __init__(self, service: Service, senders: Senders, exchange: MaskedExchange) -> None:
        self._store = service.store
        self._keys = service.keys
        self._shared = service.driver.shared
        self._room = service.limits.reports
        self._senders = senders
        self._exchange = exchange
        self._most: LruCache[int, int] = LruCache(_ROUNDS)
        self._finding = asyncio.Lock()

    async def put(self, assignment: str, request: Request) -> ASGIApp:
        """Take a masked report here; the next message comes from the driver. Pass on what cannot be checked here."""
        device = signed(request).keyid
        round_id = None if self._shared.leaving else round_in(self._keys.of_assignments, assignment, device)
        if round_id is None:
            onward: ASGIApp = request.scope[ONWARD](None)
            return onward
        most = await self._most_bytes(round_id, assignment)
        with self._shared.expecting(assignment, round_id):
            async with self._senders.one_at_a_time(device, request, assignment):
                with self._room.reserve(most):
                    message, digest = await read_hashed(request, most)
                    demand_body(request, digest)
                    await self._exchange.take(assignment, bytes(message), digest.hex())
        return Response(status_code=204)

    async def _most_bytes(self, round_id: int, assignment: str) -> int:
        found = self._most.get(round_id)
        if found is None:
            async with self._finding:  # the first reports of a round come together
                found = self._most.get(round_id)
                if found is None:
                    found = self._most.put(round_id, await run_in_threadpool(self._find, assignment))
        return found

    def _find(self, assignment: str) -> int:
        with self._store.database.reading() as records:
            record = records.assignment(assignment)
        return most_bytes(self._store.plan(record.plan_sha256).of_round(record.number).report)


T = TypeVar("T")
NUMBER = re.compile(r"[0-9]{1,2}")
"""The number of a message of secure aggregation, in a path."""


class DeviceApi:
    """The endpoints, as methods on signed HTTP requests."""

    def __init__(
        self, service: Service, assignments: AssignmentAccess, senders: Senders, masked: MaskedReports
    ) -> None:
        self._assignments = assignments
        self._masked = masked
        self._senders = senders
        self._driver = service.driver
        self._store = service.store
        self._registry = service.registry
        # One at a time: many enrolments at once must not take all threads, nor delay the driver at the database.
        self._enrolling = asyncio.Lock()
        self._settings = service.settings
        self._metrics = service.metrics
        self._limits = service.limits
        self._check_ins = service.check_ins
        self._public: LruCache[str, BlobRef] = LruCache(REMEMBERED)
        self._versions: LruCache[tuple[str, str], tuple[BlobRef, BlobRef]] = LruCache(REMEMBERED)
        self._deltas, self._readers = Deltas(service.store.blobs, service.limits.deltas), Senders()

    async def enrol(self, request: Request) -> Response:
        """Enrol the signer as a device, with an id and a credential for secure aggregation. May be repeated."""
        with self._limits.newcomers.hold(partial(hang_up, request.scope)):
            message = await read_message(request, messages.Enrol, self._settings.message_limit_bytes)
        who = signed(request)
        async with self._enrolling:
            return answer(await run_in_threadpool(self._registry.enrol, message, who.keyid, who.created))

    async def check_in(self, population: str, request: Request) -> ASGIApp:
        """Check a device in: it gets a session, or a reason and a time to come back."""
        body, who = await read_body(request, self._settings.message_limit_bytes), signed(request)
        message, device = read_as(body, messages.CheckIn), who.keyid
        command = commands.CheckInDevice(
            population, device, Eligibility.of(device, message), message.token or "", who.created
        )
        outcome: messages.CheckInAnswer | None = self._driver.turn_away(command)
        if outcome is None and ONWARD in request.scope:
            passed_on: ASGIApp = request.scope[ONWARD](bytes(body))
            return passed_on
        if outcome is None:
            outcome = await self._ask(command)
        self._metrics.checked_in(outcome)
        now = time.time()
        self._check_ins.add(population, command.device, message.capabilities, now, message.labels)
        self._driver.stated(population, message, now)
        return answer(outcome)

    async def assign(self, session: str, request: Request) -> Response:
        """Wait for a round, as long as `Prefer: wait=N` allows: of the tasks in the body, or of any offered task."""
        wait_s, headers = preferred_wait(request, self._settings.max_wait_s)
        body = await read_body(request, self._settings.message_limit_bytes)
        tasks = frozenset(read_as(body, messages.Willing).tasks) if body else None
        future = self._driver.submit(commands.AwaitAssignment(session, signed(request).keyid, wait_s, tasks))
        try:
            outcome: messages.AssignmentAnswer = await while_connected(request, future)
        except ClientDisconnect:
            await self._ask(commands.CancelWait(session, future))
            raise
        if isinstance(outcome, messages.Assignment):
            self._assignments.remember(outcome, signed(request).keyid)
        return answer(outcome, headers)

    async def blob(self, sha256: str, request: Request) -> Response:
        """Immutable bytes by digest: a plan, a graph, a checkpoint."""
        ref = await self._public_blob(sha256)
        self._driver.fetched(signed(request).keyid, sha256)
        return await run_in_threadpool(serve_blob, request, ref, self._store.blobs)

    async def delta(self, sha256: str, base: str, request: Request) -> Response:
        """What leads from a checkpoint that the device holds to another one of the same task."""
        device, pair = signed(request).keyid, (base, sha256)
        versions = self._versions.get(pair)
        if versions is None:
            versions = self._versions.put(pair, await run_in_threadpool(self._find_versions, *pair))
        async with AsyncExitStack() as holding:
            await holding.enter_async_context(self._readers.one_at_a_time(device, request))
            delta = await holding.enter_async_context(self._deltas.between(*versions, request))
            self._driver.fetched(device, sha256)
            held = holding.pop_all()
        return HeldAnswer(delta, held)

    async def model(self, population: str, name: str, request: Request) -> Response:
        """The version of a model that the device is to use, by its roll-outs. The query: the labels that it tells."""
        device, labels = signed(request).keyid, _labels(request)
        release = await run_in_threadpool(self._store.model_for, device, labels, population, name)
        if release is None:
            raise NoModel(f"population {population!r} has no version of a model {name!r} for this device")
        return answer(messages.ReleasedModel(release))

    async def _public_blob(self, sha256: str) -> BlobRef:
        ref = self._public.get(sha256)
        return ref or self._public.put(sha256, await run_in_threadpool(self._find_public, sha256))

    async def hold(self, assignment: str, request: Request) -> Response:
        """Hear, within the time that `Prefer: wait=N` allows, that the round does not need the device; else 204."""
        async with self._assignments.present(assignment, request):
            wait_s, headers = preferred_wait(request, self._settings.max_wait_s)
            await self._assignments.receipt(assignment)  # of one that is not open: why
            future = self._driver.presence.hold(assignment)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0 if self._driver.draining else wait_s):
                        await while_connected(request, future)
            finally:
                self._driver.presence.release(assignment, future)
        return Response(status_code=204, headers=headers)

    async def outcome(self, assignment: str, request: Request) -> Response:
        """Whether the round of an assignment was committed with its report in it, as far as that is decided."""
        await self._assignments.part(assignment, request)
        return answer(await run_in_threadpool(self._settled, assignment))

    async def say(self, assignment: str, number: str, request: Request) -> ASGIApp:
        """Take a message of the round's secure aggregation, once, and answer as `hear` does for the next number."""
        spoken = _number(number)
        if ONWARD in request.scope:
            return await self._masked.put(assignment, request)
        async with self._assignments.present(assignment, request) as part:
            limit = self._settings.message_limit_bytes
            if spoken == MessageType.MASKED:
                limit = most_bytes(part.layout)
                await self._assignments.receipt(assignment)  # before room is reserved: is it still needed?
            wait_s, headers = preferred_wait(request, self._settings.max_wait_s)
            coming: Future[bytes | None] = Future()
            # Only the driver's thread ends it from here on, so nobody can cancel it under its hands.
            coming.set_running_or_notify_cancel()
            command = commands.PutMessage(assignment, signed(request).keyid, spoken, b"", "", wait_s, coming)
            await self._put(command, request, limit)
            return await self._message(coming, headers, request)

    async def _put(self, command: commands.PutMessage, request: Request, limit: int) -> None:
        """Read the message of a command, and have it taken. Nothing holds its bytes while the next one is awaited."""
        async with self._senders.one_at_a_time(command.device, request, command.assignment):
            with self._limits.reports.reserve(limit):
                message, digest = await read_hashed(request, limit)
                demand_body(request, digest)
                await self._ask(replace(command, message=bytes(message), sha256=digest.hex()))

    async def hear(self, assignment: str, number: str, request: Request) -> Response:
        """Wait, as long as `Prefer: wait=N` says, for a message of the secure aggregation; 204 when none is there."""
        heard = _number(number)
        async with self._assignments.present(assignment, request):
            wait_s, headers = preferred_wait(request, self._settings.max_wait_s)
            return await self._message(
                self._driver.submit(commands.AwaitMessage(assignment, heard, wait_s)), headers, request
            )

    async def _message(self, answer: Future[bytes | None], headers: dict[str, str], request: Request) -> Response:
        message = await while_connected(request, answer)
        if message is None:
            return Response(status_code=204, headers=headers)
        return Response(message, media_type="application/octet-stream", headers=headers)

    async def abort(self, assignment: str, request: Request) -> Response:
        """Abort an assignment. May be repeated."""
        await self._assignments.part(assignment, request)
        message = await read_message(request, messages.Abort, self._settings.message_limit_bytes)
        await self._ask(commands.AbortAssignment(assignment, message))
        return Response(status_code=204)

    async def _ask(self, command: commands.Command[T]) -> T:
        return await asyncio.wrap_future(self._driver.submit(command))

    def _find_public(self, sha256: str) -> BlobRef:
        with self._store.database.reading() as records:
            return records.blob(sha256, public=True)

    def _settled(self, assignment: str) -> messages.Settled:
        with self._store.database.reading() as records:
            return records.cohorts.settled(assignment)

    def _find_versions(self, base: str, target: str) -> tuple[BlobRef, BlobRef]:
        with self._store.database.reading() as records:
            refs = records.blob(base, public=True), records.blob(target, public=True)
            if not records.attempts.of_one_task({base, target}):
                raise UnknownBlob(f"no task has a checkpoint {base[:12]}… and one {target[:12]}…")
        return refs


def _labels(request: Request) -> dict[str, str]:
    """Those in the query. Raises MalformedMessage."""
    told = request.query_params.multi_items()
    labels = dict(told)
    try:
        if len(labels) < len(told):
            raise ValueError("a label is there twice")
        check_labels(labels)
    except ValueError as error:
        raise MalformedMessage(str(error)) from error
    return labels


def _number(text: str) -> int:
    """Of a message of secure aggregation. Raises MalformedMessage."""
    if not NUMBER.fullmatch(text):
        raise MalformedMessage("messages of secure aggregation have numbers of one digit or two")
    return int(text)


# The table of the device protocol's routes, all authenticated, and their router. Spec: docs/spec/wire.md §1.


# A router for the device protocol's routes, on the device port and nowhere else.
#
# The layers of a framework cost more than most of these routes do.

NAME = re.compile(r"\{(\w+)\}")
"""A name in the path of a route: it stands for one segment, or for a part of one."""
Act = Callable[..., Awaitable[ASGIApp]]
"""An endpoint: it gets the names in the path and the request, and answers with a response."""
Admit = Callable[[Request], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DeviceRoute:
    """A row of the table of routes.

    admit: authenticates a request, and counts it for its signer, before its body is read. about: the operation, as the
    OpenAPI document has it.
    """

    method: str
    path: str
    act: Act
    admit: Admit
    about: Mapping[str, Any]


class DeviceRouter:
    """ASGI: answers the requests for the routes of a table, and passes those for any other path on to `others`."""

    def __init__(self, routes: Sequence[DeviceRoute], others: ASGIApp, retry: messages.RetryWindow) -> None:
        self._others = others
        self._retry = retry
        self._routes = [(re.compile(NAME.sub(r"(?P<\1>[^/]+)", route.path)), route) for route in routes]
        self._of_method: dict[str, list[tuple[re.Pattern[str], DeviceRoute]]] = {}
        for pattern, route in self._routes:
            self._of_method.setdefault(route.method, []).append((pattern, route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            return await self._others(scope, receive, send)
        for pattern, route in self._of_method.get(scope["method"], ()):
            if match := pattern.fullmatch(scope["path"]):
                scope["route"] = route
                return await self._answer(route, match.groupdict(), Request(scope, receive, send), send)
        at_path = [route for pattern, route in self._routes if pattern.fullmatch(scope["path"])]
        if not at_path:
            return await self._others(scope, receive, send)
        scope["route"] = at_path[0]
        wrong = HTTPException(405, headers={"Allow": ", ".join(route.method for route in at_path)})
        return await answer_error(Request(scope), wrong, self._retry)(scope, receive, send)

    async def _answer(self, route: DeviceRoute, names: dict[str, str], request: Request, send: Send) -> None:
        try:
            await route.admit(request)
            answer: ASGIApp = await route.act(request=request, **names)
        except (Refusal, RequestError, ClientDisconnect) as error:
            answer = answer_error(request, error, self._retry)
        except Exception as error:
            await answer_error(request, error, self._retry)(request.scope, request.receive, send)
            raise  # for the server to log
        await answer(request.scope, request.receive, send)


SIGNATURES = (
    "unsigned", "malformed-signature", "unknown-device", "forged-signature", "stale-signature", "replayed-signature",
    "device-revoked",
)  # fmt: skip
"""Problems of any request that a device signs."""
DEVICES = ApiDocument(
    problems=PROBLEMS,
    everywhere=(*SIGNATURES, *ANYWHERE),
    messages=tuple(EXAMPLES),
    signatures={
        "device": {
            "type": "http",
            "scheme": "signature",
            "description": "RFC 9421: the fields Signature-Input and Signature, as docs/spec/wire.md §10 says. "
            "At enrolment, keyid is the public key itself.",
        }
    },
)
_BODY = ("malformed-message", "too-large", "digest-mismatch")
"""Problems of any request with a body."""
_OWN = ("unknown-assignment", "foreign-assignment")
_OVER = ("no-longer-needed", "too-stale")
_ENDING = (*_BODY, *_OWN, "conflicting-report")
_COUNTING = (*_ENDING, *_OVER, "invalid-report")
_SPOKEN = (*_ENDING, "no-longer-needed", "unusable-message")
_UPLOAD = ("Upload-Offset", "Upload-Length", "Upload-Complete", "Repr-Digest")
_DIGEST, _WAIT, _WAITED = ("Content-Digest",), ("Prefer",), ("Preference-Applied",)
_ARRIVED = ("Upload-Offset", "Upload-Complete")
_CHECKED_IN = {200: Answer("Outcome", (messages.Accepted, messages.Rejected))}
_ASSIGNED = {200: Answer("Outcome", (messages.Assignment, messages.Rejected), _WAITED)}
_SERVED = {
    200: Answer("The bytes", (BYTES,), ("ETag",)),
    206: Answer("The requested range", (BYTES,), ("ETag", "Content-Range")),
    304: Answer("Not modified", (), ("ETag",)),
}
_NEEDED = {204: Answer("Its report is still needed", (), _WAITED)}
_COUNTED = {200: Answer("Counted, once", (messages.Receipt,))}
_HERE = {204: Answer("The part that has arrived", (), _ARRIVED)}
_MORE = {204: Answer("More is wanted", (), _ARRIVED)}
_HEARD = {200: Answer("The next message", (BYTES,), _WAITED), 204: Answer("It is not there yet", (), _WAITED)}
_PATTERNS = {"number": f"^{NUMBER.pattern}$"}
"""Of names in paths, where not any text is one."""


def device_routes(api: DeviceApi, reports: ReportApi, authenticator: Authenticator) -> tuple[DeviceRoute, ...]:
    """The table: a route's method, path and endpoint, its answers and problems, and what it takes."""
    enrolled, newcomer = partial(_route, authenticator.device), partial(_route, authenticator.new_device)
    about = DEVICES.operation
    report, message = "/v1/assignments/{assignment}/report", "/v1/assignments/{assignment}/secagg/{number}"
    return (
        enrolled("POST", "/v1/populations/{population}/checkins", api.check_in,
                 about(_CHECKED_IN, (*_BODY, "unknown-population"), takes=messages.CheckIn, fields=_DIGEST)),
        enrolled("POST", "/v1/sessions/{session}/assignments", api.assign,
                 about(_ASSIGNED, (*_BODY, "unknown-session", "foreign-session"), takes=messages.Willing,
                       fields=(*_DIGEST, *_WAIT))),
        enrolled("GET", "/v1/blobs/{sha256}", api.blob,
                 about(_SERVED, ("unknown-blob", "range-not-satisfiable"),
                       fields=("Range", "If-Range", "If-None-Match"))),
        enrolled("GET", "/v1/blobs/{sha256}/deltas/{base}", api.delta,
                 about({200: Answer("The delta", (BYTES,))}, ("unknown-blob",))),
        enrolled("GET", "/v1/populations/{population}/models/{name}", api.model,
                 about({200: Answer("Its release", (messages.ReleasedModel,))}, ("malformed-message", "no-model"))),
        enrolled("GET", "/v1/assignments/{assignment}", api.hold, about(_NEEDED, (*_OWN, *_OVER), fields=_WAIT)),
        enrolled("GET", "/v1/assignments/{assignment}/outcome", api.outcome,
                 about({200: Answer("As far as it is decided", (messages.Settled,))}, _OWN)),
        enrolled("PUT", report, reports.put, about(_COUNTED, _COUNTING, takes=BYTES, fields=_DIGEST)),
        enrolled("HEAD", report, reports.head, about(_HERE, (*_OWN, *_OVER))),
        enrolled("PATCH", report, reports.patch,
                 about(_COUNTED | _MORE, (*_COUNTING, "mismatching-offset"), takes="application/partial-upload",
                       fields=(*_DIGEST, *_UPLOAD))),
        enrolled("POST", "/v1/assignments/{assignment}:abort", api.abort,
                 about({204: Answer("Aborted")}, _ENDING, takes=messages.Abort, fields=_DIGEST)),
        enrolled("PUT", message, api.say, about(_HEARD, _SPOKEN, takes=BYTES, fields=(*_DIGEST, *_WAIT))),
        enrolled("GET", message, api.hear,
                 about(_HEARD, ("malformed-message", *_OWN, "no-longer-needed"), fields=_WAIT)),
        newcomer("POST", "/v1/devices", api.enrol,
                 about({200: Answer("Enrolled", (messages.Enrolled,))}, (*_BODY, "not-attested"), takes=messages.Enrol,
                       fields=_DIGEST)),
    )  # fmt: skip


def paths_of(routes: Sequence[DeviceRoute]) -> dict[str, dict[str, Any]]:
    """The operations of routes by path and method, as an OpenAPI document has them."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = route.about
    return paths


def _route(admit: Admit, method: str, path: str, act: Act, about: dict[str, Any]) -> DeviceRoute:
    """A row: its endpoint's name and docstring say in the document what it does."""
    name = act.__name__
    about |= {
        "tags": ["devices"],
        "summary": name.replace("_", " ").title(),
        "description": inspect.getdoc(act),
        "operationId": re.sub(r"\W", "_", f"{name}{path}_{method.lower()}"),
    }
    if in_path := [_parameter(parameter) for parameter in NAME.findall(path)]:
        about["parameters"] = [*in_path, *about.get("parameters", ())]
    return DeviceRoute(method, path, act, admit, about)


def _parameter(name: str) -> dict[str, Any]:
    """A name in a path, in the document."""
    schema = {"type": "string", "title": name.title()}
    if name in _PATTERNS:
        schema["pattern"] = _PATTERNS[name]
    return {"name": name, "in": "path", "required": True, "schema": schema}
