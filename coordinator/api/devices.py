"""The device protocol's routes. Spec: docs/spec/wire.md."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TypeVar

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from coordinator.api.blobs import serve_blob
from coordinator.api.http import answer, content_digest, preferred_wait, read_as, read_body, read_message
from coordinator.api.openapi import answers, body
from coordinator.errors import (
    DigestMismatch,
    InvalidReport,
    MalformedMessage,
    NoLongerNeeded,
    TooManyRequests,
    Unavailable,
)
from coordinator.secure import UPLOAD
from coordinator.service import Service
from coordinator.submissions import Arrive, GiveUp, HangUp, Hear, Report, Request, Say, Wait
from fedcore import checkpoint
from fedcore.errors import ReportError, SchemaError
from fedcore.params import Float32
from fedcore.plan import BlobRef
from fedcore.report import ReportLayout
from fedcore.wire.messages import Abort, Accepted, Assignment, CheckIn, Enrol, Enrolled, Receipt, Rejected, Willing
from secagg.keys import enrol

T = TypeVar("T")
_HEADER_BYTES = 4096
"""Room for a safetensors header around the one vector of a report."""
_SMALL_BYTES = 1 << 15
"""Up to here, hashing and parsing takes less time than handing the work to a thread."""


class DeviceApi:
    """What devices may ask, as methods on HTTP requests."""

    def __init__(self, service: Service) -> None:
        self._driver = service.driver
        self._store = service.store
        self._keys = service.keys
        self._settings = service.settings
        self._metrics = service.metrics
        self._limits = service.limits
        self._runtimes = service.runtimes
        self._public: dict[str, BlobRef] = {}

    async def enrol(self, request: HttpRequest) -> Response:
        """Give a device the credential that its peers in secure aggregation ask for. May be repeated."""
        message = await read_message(request, Enrol, self._settings.message_limit_bytes)
        server, authority = (key.public_key().public_bytes_raw() for key in (self._keys.server, self._keys.authority))
        return answer(Enrolled(enrol(self._keys.authority, message.id), server, authority))

    async def check_in(self, population: str, request: HttpRequest) -> Response:
        """A device is willing to work: it gets a session, or a reason and a time to come back."""
        message = await read_message(request, CheckIn, self._settings.message_limit_bytes)
        if not 0 < len(message.device) <= 200:
            raise MalformedMessage("`device` must have 1 to 200 characters")
        self._admit(message.device)
        found = await self._ask(Arrive(population, message))
        self._metrics.checked_in(found)
        self._runtimes.add(message.runtime)
        return answer(found)

    async def assign(self, session: str, request: HttpRequest) -> Response:
        """Wait, as long as `Prefer: wait=N` says, to be selected for a round; without a body, of any offered task."""
        wait_s, headers = preferred_wait(request, self._settings.max_wait_s)
        given = await read_body(request, self._settings.message_limit_bytes)
        tasks = frozenset(read_as(given, Willing).tasks) if given else None
        waiting = asyncio.ensure_future(self._ask(Wait(session, wait_s, tasks)))
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
        if sha256 not in self._public:
            self._public[sha256] = await run_in_threadpool(self._find_public, sha256)
        return await run_in_threadpool(serve_blob, request, self._public[sha256], self._store.blobs)

    async def report(self, assignment: str, request: HttpRequest) -> Response:
        """Deliver an assignment's report. Sending the same bytes again gives the same receipt."""
        digest = content_digest(request)
        layout = await run_in_threadpool(self._layout_of, assignment)
        data = await read_body(request, 4 * layout.size + _HEADER_BYTES)
        if len(data) <= _SMALL_BYTES:
            report_L = parse_report(data, digest, layout)
        else:
            report_L = await run_in_threadpool(parse_report, data, digest, layout)
        return answer(await self._ask(Report(assignment, digest.hex(), report_L)))

    async def say(self, assignment: str, number: int, request: HttpRequest) -> Response:
        """Take a message of the round's secure aggregation, once, and answer as `hear` does for the next number."""
        limit = self._settings.message_limit_bytes
        if number == UPLOAD:
            layout = await run_in_threadpool(self._layout_of, assignment)
            # A masked report takes at most half a word per value, and a word for each segment and the checks.
            limit = 4 * layout.size + 8 * len(layout.segments) + _HEADER_BYTES
        await self._ask_about(assignment, Say(assignment, number, await read_body(request, limit)))
        return await self.hear(assignment, number + 1, request)

    async def hear(self, assignment: str, number: int, request: HttpRequest) -> Response:
        """Wait, as long as `Prefer: wait=N` says, for a message of the secure aggregation; 204 when none is there."""
        wait_s, headers = preferred_wait(request, self._settings.max_wait_s)
        message = await self._ask_about(assignment, Hear(assignment, number, wait_s))
        if message is None:
            return Response(status_code=204, headers=headers)
        return Response(message, media_type="application/octet-stream", headers=headers)

    async def abort(self, assignment: str, request: HttpRequest) -> Response:
        """Give an assignment up. May be repeated."""
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

    async def _ask_about(self, assignment: str, request: Request[T]) -> T:
        """Ask the driver, whose memory cannot tell an assignment that is over from one that never was."""
        try:
            return await self._ask(request)
        except NoLongerNeeded:
            await run_in_threadpool(self._layout_of, assignment)
            raise

    def _find_public(self, sha256: str) -> BlobRef:
        with self._store.database.reading() as records:
            return records.blob(sha256, public=True)

    def _layout_of(self, assignment: str) -> ReportLayout:
        with self._store.database.reading() as records:
            found = records.assignment(assignment)
        return self._store.plan(found.plan_sha256).report


def device_router(api: DeviceApi) -> APIRouter:
    """The routes of `api`."""
    router = APIRouter(tags=["devices"])
    add = router.add_api_route
    arriving = ("malformed-message", "unknown-population", "too-large")
    add(
        "/v1/populations/{population}/checkins",
        api.check_in,
        methods=["POST"],
        openapi_extra=body("application/json", CheckIn),
        responses=answers(200, "Outcome", Accepted, Rejected, problems=arriving),
    )
    add(
        "/v1/sessions/{session}/assignments",
        api.assign,
        methods=["POST"],
        openapi_extra=body("application/json", Willing),
        responses=answers(200, "Outcome", Assignment, Rejected, problems=("malformed-message", "unknown-session")),
    )
    serving = answers(200, "The bytes", problems=("unknown-blob", "range-not-satisfiable"))
    add("/v1/blobs/{sha256}", api.blob, methods=["GET"], responses=serving)
    refusals = ("malformed-message", "unknown-assignment", "conflicting-report", "too-large")
    of_report = (*refusals, "no-longer-needed", "digest-mismatch", "invalid-report")
    add(
        "/v1/assignments/{assignment}/report",
        api.report,
        methods=["PUT"],
        openapi_extra=body("application/octet-stream"),
        responses=answers(200, "Counted, once", Receipt, problems=of_report),
    )
    add(
        "/v1/assignments/{assignment}:abort",
        api.abort,
        methods=["POST"],
        status_code=204,
        openapi_extra=body("application/json", Abort),
        responses=answers(204, "Given up", problems=refusals),
    )
    _add_secure_routes(router, api)
    return router


def _add_secure_routes(router: APIRouter, api: DeviceApi) -> None:
    """Where devices enrol, and where they exchange the messages of secure aggregation."""
    router.add_api_route(
        "/v1/devices",
        api.enrol,
        methods=["POST"],
        openapi_extra=body("application/json", Enrol),
        responses=answers(200, "Enrolled", Enrolled, problems=("malformed-message", "too-large")),
    )
    path = "/v1/assignments/{assignment}/secagg/{number}"
    over = ("malformed-message", "unknown-assignment", "no-longer-needed")
    router.add_api_route(
        path,
        api.say,
        methods=["PUT"],
        openapi_extra=body("application/octet-stream"),
        responses=answers(
            200,
            "Taken, once: the next message's bytes; 204 when not yet",
            problems=(*over, "conflicting-report", "too-large", "unusable-message"),
        ),
    )
    hearing = answers(200, "The bytes; 204 when not yet", problems=over)
    router.add_api_route(path, api.hear, methods=["GET"], responses=hearing)


def parse_report(data: bytes, digest: bytes, layout: ReportLayout) -> Float32:
    """The report in a body: float32 (L,), checked against its layout. Raises DigestMismatch or InvalidReport."""
    if hashlib.sha256(data).digest() != digest:
        raise DigestMismatch("the body is not the one that Content-Digest was made of; send it again")
    try:
        report_L = checkpoint.decode(data, layout.wire)["report"]
        layout.check(report_L)
    except (SchemaError, ReportError) as error:
        raise InvalidReport(str(error)) from error
    return report_L


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
