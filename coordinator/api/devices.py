"""The device protocol's routes. Spec: docs/spec/wire.md."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from coordinator.api.blobs import serve_blob
from coordinator.api.http import answer, preferred_wait, read_body, read_message
from coordinator.api.openapi import body, signed_answers
from coordinator.api.signed import Gate, signed
from coordinator.errors import ForeignAssignment, InvalidReport, MalformedMessage, TooManyRequests, Unavailable
from coordinator.recent import Recent
from coordinator.secure import UPLOAD
from coordinator.service import Service
from coordinator.submissions import Arrive, GiveUp, HangUp, Hear, Report, Request, Say, Wait
from fedcore import checkpoint
from fedcore.errors import ReportError, SchemaError
from fedcore.params import Float32
from fedcore.plan import BlobRef
from fedcore.report import ReportLayout
from fedcore.wire.messages import Abort, Accepted, Assignment, CheckIn, Enrol, Enrolled, Receipt, Rejected

T = TypeVar("T")
_HEADER_BYTES = 4096
"""Room for a safetensors header around the one vector of a report."""
_SMALL_BYTES = 1 << 15
"""Up to here, hashing and parsing takes less time than handing the work to a thread."""
MESSAGE = ("malformed-message", "too-large", "digest-mismatch")
"""What any request with a body may be refused with."""
OWN = ("unknown-assignment", "foreign-assignment")
_REMEMBERED = 1 << 16
"""Assignments, and blobs, whose unchanging part is kept in memory."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What never changes of an assignment: whose it is, and what its report looks like."""

    device: str
    layout: ReportLayout


class DeviceApi:
    """What devices may ask, as methods on signed HTTP requests."""

    def __init__(self, service: Service) -> None:
        self._driver = service.driver
        self._store = service.store
        self._registry = service.registry
        self._settings = service.settings
        self._metrics = service.metrics
        self._limits = service.limits
        self._runtimes = service.runtimes
        self._public: Recent[str, BlobRef] = Recent(_REMEMBERED)
        self._parts: Recent[str, _Part] = Recent(_REMEMBERED)

    async def enrol(self, request: HttpRequest) -> Response:
        """Make whoever signed this a device, with an id and a credential for secure aggregation. May be repeated."""
        message = await read_message(request, Enrol, self._settings.message_limit_bytes)
        who = signed(request)
        return answer(await run_in_threadpool(self._registry.enrol, message, who.keyid, who.created))

    async def check_in(self, population: str, request: HttpRequest) -> Response:
        """A device is willing to work: it gets a session, or a reason and a time to come back."""
        message = await read_message(request, CheckIn, self._settings.message_limit_bytes)
        device = signed(request).keyid
        self._admit(device)
        found = await self._ask(Arrive(population, device, message))
        self._metrics.checked_in(found)
        able = message.capabilities
        self._runtimes.add(f"{able.runtime} {able.version}, {able.engine}")
        return answer(found)

    async def assign(self, session: str, request: HttpRequest) -> Response:
        """Wait, as long as `Prefer: wait=N` says, to be selected for a round."""
        wait_s, headers = preferred_wait(request, self._settings.max_wait_s)
        waiting = asyncio.ensure_future(self._ask(Wait(session, signed(request).keyid, wait_s)))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return answer(waiting.result(), headers)
        finally:
            waiting.cancel()
            gone.cancel()
        await self._ask(HangUp(session))
        raise Unavailable("the connection was closed")

    async def blob(self, sha256: str, request: HttpRequest) -> Response:
        """Immutable bytes by digest: a plan, a graph, a checkpoint."""
        path = self._store.blobs.path(sha256)
        ref = self._public.get(sha256)
        if ref is None:
            ref = self._public.put(sha256, await run_in_threadpool(self._find_public, sha256))
        return serve_blob(request, ref, path)

    async def report(self, assignment: str, request: HttpRequest) -> Response:
        """Deliver an assignment's report. Sending the same bytes again gives the same receipt."""
        layout = await self._own(assignment, request)
        digest = signed(request).digest
        if digest is None:
            raise MalformedMessage("a report needs a body, and its digest as Content-Digest")
        data = await read_body(request, 4 * layout.size + _HEADER_BYTES)
        if len(data) <= _SMALL_BYTES:
            report_L = parse_report(data, layout)
        else:
            report_L = await run_in_threadpool(parse_report, data, layout)
        return answer(await self._ask(Report(assignment, digest.hex(), report_L)))

    async def say(self, assignment: str, number: int, request: HttpRequest) -> Response:
        """Take a message of the round's secure aggregation, once, and answer as `hear` does for the next number."""
        layout = await self._own(assignment, request)
        limit = self._settings.message_limit_bytes
        if number == UPLOAD:
            # A masked report takes at most half a word per value, and a word for each segment and the checks.
            limit = 4 * layout.size + 8 * len(layout.segments) + _HEADER_BYTES
        await self._ask(Say(assignment, number, await read_body(request, limit)))
        return await self.hear(assignment, number + 1, request)

    async def hear(self, assignment: str, number: int, request: HttpRequest) -> Response:
        """Wait, as long as `Prefer: wait=N` says, for a message of the secure aggregation; 204 when none is there."""
        await self._own(assignment, request)
        wait_s, headers = preferred_wait(request, self._settings.max_wait_s)
        message = await self._ask(Hear(assignment, number, wait_s))
        if message is None:
            return Response(status_code=204, headers=headers)
        return Response(message, media_type="application/octet-stream", headers=headers)

    async def abort(self, assignment: str, request: HttpRequest) -> Response:
        """Give an assignment up. May be repeated."""
        await self._own(assignment, request)
        message = await read_message(request, Abort, self._settings.message_limit_bytes)
        await self._ask(GiveUp(assignment, message))
        return Response(status_code=204)

    def _admit(self, device: str) -> None:
        try:
            self._limits.device.admit(device)
        except TooManyRequests:
            self._metrics.shed.labels("device").inc()
            raise

    async def _ask(self, request: Request[T]) -> T:
        return await asyncio.wrap_future(self._driver.submit(request))

    def _find_public(self, sha256: str) -> BlobRef:
        with self._store.database.reading() as records:
            return records.blob(sha256, public=True)

    async def _own(self, assignment: str, request: HttpRequest) -> ReportLayout:
        """The layout of the assignment's report. Raises UnknownAssignment; ForeignAssignment if it is another's."""
        part = self._parts.get(assignment)
        if part is None:
            part = self._parts.put(assignment, await run_in_threadpool(self._find_part, assignment))
        if part.device != signed(request).keyid:
            raise ForeignAssignment("the assignment is another device's; check in for one of your own")
        return part.layout

    def _find_part(self, assignment: str) -> _Part:
        with self._store.database.reading() as records:
            found = records.assignment(assignment)
        return _Part(found.device, self._store.plan(found.plan_sha256).report)


def device_router(api: DeviceApi, gate: Gate) -> APIRouter:
    """The routes of `api`, behind the gate, all of them."""
    router = APIRouter(tags=["devices"])
    router.include_router(_newcomers(api), dependencies=[Depends(gate.newcomer)])
    for routes in (_working(api), _reporting(api), _aggregating(api)):
        router.include_router(routes, dependencies=[Depends(gate.device)])
    return router


def _newcomers(api: DeviceApi) -> APIRouter:
    """Where devices enrol."""
    router = APIRouter()
    router.add_api_route(
        "/v1/devices",
        api.enrol,
        methods=["POST"],
        openapi_extra=body("application/json", Enrol),
        responses=signed_answers(200, "Enrolled", Enrolled, problems=(*MESSAGE, "not-attested")),
    )
    return router


def _working(api: DeviceApi) -> APIRouter:
    """Where devices offer themselves, and fetch what they need."""
    router = APIRouter()
    router.add_api_route(
        "/v1/populations/{population}/checkins",
        api.check_in,
        methods=["POST"],
        openapi_extra=body("application/json", CheckIn),
        responses=signed_answers(200, "Outcome", Accepted, Rejected, problems=(*MESSAGE, "unknown-population")),
    )
    router.add_api_route(
        "/v1/sessions/{session}/assignments",
        api.assign,
        methods=["POST"],
        responses=signed_answers(200, "Outcome", Assignment, Rejected, problems=("unknown-session", "foreign-session")),
    )
    serving = signed_answers(200, "The bytes", problems=("unknown-blob", "range-not-satisfiable"))
    router.add_api_route("/v1/blobs/{sha256}", api.blob, methods=["GET"], responses=serving)
    return router


def _reporting(api: DeviceApi) -> APIRouter:
    """Where assignments end."""
    router = APIRouter()
    ending = (*MESSAGE, *OWN, "conflicting-report")
    router.add_api_route(
        "/v1/assignments/{assignment}/report",
        api.report,
        methods=["PUT"],
        openapi_extra=body("application/octet-stream"),
        responses=signed_answers(
            200, "Counted, once", Receipt, problems=(*ending, "no-longer-needed", "invalid-report")
        ),
    )
    router.add_api_route(
        "/v1/assignments/{assignment}:abort",
        api.abort,
        methods=["POST"],
        status_code=204,
        openapi_extra=body("application/json", Abort),
        responses=signed_answers(204, "Given up", problems=ending),
    )
    return router


def _aggregating(api: DeviceApi) -> APIRouter:
    """Where devices exchange the messages of secure aggregation."""
    router = APIRouter()
    path = "/v1/assignments/{assignment}/secagg/{number}"
    taken = (*MESSAGE, *OWN, "no-longer-needed", "conflicting-report", "unusable-message")
    router.add_api_route(
        path,
        api.say,
        methods=["PUT"],
        openapi_extra=body("application/octet-stream"),
        responses=signed_answers(200, "Taken, once: the next message's bytes; 204 when not yet", problems=taken),
    )
    hearing = signed_answers(
        200, "The bytes; 204 when not yet", problems=("malformed-message", *OWN, "no-longer-needed")
    )
    router.add_api_route(path, api.hear, methods=["GET"], responses=hearing)
    return router


def parse_report(data: bytes, layout: ReportLayout) -> Float32:
    """The report in a body: float32 (L,), checked against its layout. Raises InvalidReport."""
    try:
        report_L = checkpoint.decode(data, layout.wire)["report"]
        layout.check(report_L)
    except (SchemaError, ReportError) as error:
        raise InvalidReport(str(error)) from error
    return report_L


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
