"""The device protocol's routes, all of them behind the gate. Spec: docs/spec/wire.md §1."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from coordinator.api.devices import DeviceApi
from coordinator.api.openapi import BYTES, Said, signed_route
from coordinator.api.reports import ReportApi
from coordinator.api.signed import Gate
from fedcore.wire.messages import Abort, Accepted, Assignment, CheckIn, Enrol, Enrolled, Receipt, Rejected, Willing

_BODY = ("malformed-message", "too-large", "digest-mismatch")
"""What any request with a body may be refused with."""
_OWN = ("unknown-assignment", "foreign-assignment")
_UPLOAD = ("Upload-Offset", "Upload-Length", "Upload-Complete", "Repr-Digest")
_DIGEST, _WAIT, _WAITED = ("Content-Digest",), ("Prefer",), ("Preference-Applied",)


def device_router(api: DeviceApi, reports: ReportApi, gate: Gate) -> APIRouter:
    """The routes of both."""
    router = APIRouter(tags=["devices"])
    router.include_router(_newcomers(api), dependencies=[Depends(gate.newcomer)])
    for routes in (_working(api), _reporting(api, reports), _aggregating(api)):
        router.include_router(routes, dependencies=[Depends(gate.device)])
    return router


def _newcomers(api: DeviceApi) -> APIRouter:
    """Where devices enrol."""
    router = APIRouter()
    said = {200: Said("Enrolled", (Enrolled,))}
    about = signed_route(said, (*_BODY, "not-attested"), takes=Enrol, fields=_DIGEST)
    router.add_api_route("/v1/devices", api.enrol, methods=["POST"], **about)
    return router


def _working(api: DeviceApi) -> APIRouter:
    """Where devices offer themselves, and fetch what they need."""
    router = APIRouter()
    outcome = {200: Said("Outcome", (Accepted, Rejected))}
    about = signed_route(outcome, (*_BODY, "unknown-population"), takes=CheckIn, fields=_DIGEST)
    router.add_api_route("/v1/populations/{population}/checkins", api.check_in, methods=["POST"], **about)
    assigned = {200: Said("Outcome", (Assignment, Rejected), _WAITED)}
    problems = (*_BODY, "unknown-session", "foreign-session")
    about = signed_route(assigned, problems, takes=Willing, fields=(*_DIGEST, *_WAIT))
    router.add_api_route("/v1/sessions/{session}/assignments", api.assign, methods=["POST"], **about)
    served = {
        200: Said("The bytes", (BYTES,), ("ETag",)),
        206: Said("Those that were asked for", (BYTES,), ("ETag", "Content-Range")),
        304: Said("The device has it", (), ("ETag",)),
    }
    fields = ("Range", "If-Range", "If-None-Match")
    about = signed_route(served, ("unknown-blob", "range-not-satisfiable"), fields=fields)
    router.add_api_route("/v1/blobs/{sha256}", api.blob, methods=["GET"], **about)
    return router


def _reporting(api: DeviceApi, reports: ReportApi) -> APIRouter:
    """Where assignments end."""
    router = APIRouter()
    path = "/v1/assignments/{assignment}/report"
    ending = (*_BODY, *_OWN, "conflicting-report")
    counting = (*ending, "no-longer-needed", "invalid-report")
    counted = {200: Said("Counted, once", (Receipt,))}
    router.add_api_route(
        path, reports.put, methods=["PUT"], **signed_route(counted, counting, takes=BYTES, fields=_DIGEST)
    )
    here = {204: Said("How much is here", (), ("Upload-Offset", "Upload-Complete"))}
    about = signed_route(here, (*_OWN, "no-longer-needed"))
    router.add_api_route(path, reports.head, methods=["HEAD"], status_code=204, **about)
    more = {204: Said("More is wanted", (), ("Upload-Offset", "Upload-Complete"))}
    about = signed_route(
        counted | more,
        (*counting, "mismatching-offset"),
        takes="application/partial-upload",
        fields=(*_DIGEST, *_UPLOAD),
    )
    router.add_api_route(path, reports.patch, methods=["PATCH"], **about)
    about = signed_route({204: Said("Given up")}, ending, takes=Abort, fields=_DIGEST)
    router.add_api_route("/v1/assignments/{assignment}:abort", api.abort, methods=["POST"], status_code=204, **about)
    return router


def _aggregating(api: DeviceApi) -> APIRouter:
    """Where devices exchange the messages of secure aggregation."""
    router = APIRouter()
    path = "/v1/assignments/{assignment}/secagg/{number}"
    heard = {200: Said("The next message", (BYTES,), _WAITED), 204: Said("It is not there yet", (), _WAITED)}
    taken = (*_BODY, *_OWN, "no-longer-needed", "conflicting-report", "unusable-message")
    about = signed_route(heard, taken, takes=BYTES, fields=(*_DIGEST, *_WAIT))
    router.add_api_route(path, api.say, methods=["PUT"], **about)
    about = signed_route(heard, ("malformed-message", *_OWN, "no-longer-needed"), fields=_WAIT)
    router.add_api_route(path, api.hear, methods=["GET"], **about)
    return router
