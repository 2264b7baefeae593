"""The device protocol's routes, all of them authenticated. Spec: docs/spec/wire.md §1."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.authentication import Authenticator
from coordinator.api.devices.endpoints import DeviceApi
from coordinator.api.devices.reports import ReportApi
from coordinator.api.examples import EXAMPLES
from coordinator.api.openapi import ANYWHERE, BYTES, Answer, ApiDocument
from fedcore.wire.messages import Abort, Accepted, Assignment, CheckIn, Enrol, Enrolled, Receipt, Rejected, Willing
from fedcore.wire.problems import PROBLEMS

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
_UPLOAD = ("Upload-Offset", "Upload-Length", "Upload-Complete", "Repr-Digest")
Add = Callable[..., None]
_DIGEST, _WAIT, _WAITED = ("Content-Digest",), ("Prefer",), ("Preference-Applied",)


class DeviceRoute(APIRoute):
    """A route: `admit` authenticates a request, then an endpoint gets it and the names in its path.

    FastAPI's own search for what an endpoint wants is left out: there is nothing to find, and it cost a tenth of a
    check-in.
    """

    admit: Callable[[Request], Awaitable[None]]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that answers a request."""
        admit, endpoint = self.admit, self.endpoint

        async def handle(request: Request) -> Response:
            await admit(request)
            answer: Response = await endpoint(request=request, **request.path_params)
            return answer

        return handle


def add_device_routes(router: APIRouter, api: DeviceApi, reports: ReportApi, authenticator: Authenticator) -> None:
    """Add the routes of both APIs to `router` itself: a router within a router would cost time."""
    add = partial(router.add_api_route, tags=["devices"], route_class_override=_behind(authenticator.device))
    _working(add, api)
    _reporting(add, api, reports)
    _aggregating(add, api)
    _enrolling(
        partial(router.add_api_route, tags=["devices"], route_class_override=_behind(authenticator.new_device)), api
    )


def _behind(admit: Callable[[Request], Awaitable[None]]) -> type[DeviceRoute]:
    return type("DeviceRoute", (DeviceRoute,), {"admit": staticmethod(admit)})


def _enrolling(add: Add, api: DeviceApi) -> None:
    """Enrolment."""
    said = {200: Answer("Enrolled", (Enrolled,))}
    about = DEVICES.route(said, (*_BODY, "not-attested"), takes=Enrol, fields=_DIGEST)
    add("/v1/devices", api.enrol, methods=["POST"], **about)


def _working(add: Add, api: DeviceApi) -> None:
    """Check-ins, assignments and downloads."""
    outcome = {200: Answer("Outcome", (Accepted, Rejected))}
    about = DEVICES.route(outcome, (*_BODY, "unknown-population"), takes=CheckIn, fields=_DIGEST)
    add("/v1/populations/{population}/checkins", api.check_in, methods=["POST"], **about)
    assigned = {200: Answer("Outcome", (Assignment, Rejected), _WAITED)}
    problems = (*_BODY, "unknown-session", "foreign-session")
    about = DEVICES.route(assigned, problems, takes=Willing, fields=(*_DIGEST, *_WAIT))
    add("/v1/sessions/{session}/assignments", api.assign, methods=["POST"], **about)
    served = {
        200: Answer("The bytes", (BYTES,), ("ETag",)),
        206: Answer("The requested range", (BYTES,), ("ETag", "Content-Range")),
        304: Answer("Not modified", (), ("ETag",)),
    }
    fields = ("Range", "If-Range", "If-None-Match")
    about = DEVICES.route(served, ("unknown-blob", "range-not-satisfiable"), fields=fields)
    add("/v1/blobs/{sha256}", api.blob, methods=["GET"], **about)
    about = DEVICES.route({200: Answer("The delta", (BYTES,))}, ("unknown-blob",))
    add("/v1/blobs/{sha256}/deltas/{base}", api.delta, methods=["GET"], **about)


def _reporting(add: Add, api: DeviceApi, reports: ReportApi) -> None:
    """Presence, reports and aborts."""
    held = {204: Answer("Its report is still needed", (), _WAITED)}
    about = DEVICES.route(held, (*_OWN, *_OVER), fields=_WAIT)
    add("/v1/assignments/{assignment}", api.hold, methods=["GET"], **about)
    path = "/v1/assignments/{assignment}/report"
    ending = (*_BODY, *_OWN, "conflicting-report")
    counting = (*ending, *_OVER, "invalid-report")
    counted = {200: Answer("Counted, once", (Receipt,))}
    add(path, reports.put, methods=["PUT"], **DEVICES.route(counted, counting, takes=BYTES, fields=_DIGEST))
    here = {204: Answer("The part that has arrived", (), ("Upload-Offset", "Upload-Complete"))}
    about = DEVICES.route(here, (*_OWN, *_OVER))
    add(path, reports.head, methods=["HEAD"], **about)
    more = {204: Answer("More is wanted", (), ("Upload-Offset", "Upload-Complete"))}
    about = DEVICES.route(
        counted | more,
        (*counting, "mismatching-offset"),
        takes="application/partial-upload",
        fields=(*_DIGEST, *_UPLOAD),
    )
    add(path, reports.patch, methods=["PATCH"], **about)
    about = DEVICES.route({204: Answer("Aborted")}, ending, takes=Abort, fields=_DIGEST)
    add("/v1/assignments/{assignment}:abort", api.abort, methods=["POST"], **about)


def _aggregating(add: Add, api: DeviceApi) -> None:
    """Messages of secure aggregation."""
    path = "/v1/assignments/{assignment}/secagg/{number}"
    heard = {200: Answer("The next message", (BYTES,), _WAITED), 204: Answer("It is not there yet", (), _WAITED)}
    taken = (*_BODY, *_OWN, "no-longer-needed", "conflicting-report", "unusable-message")
    about = DEVICES.route(heard, taken, takes=BYTES, fields=(*_DIGEST, *_WAIT))
    add(path, api.say, methods=["PUT"], **about)
    about = DEVICES.route(heard, ("malformed-message", *_OWN, "no-longer-needed"), fields=_WAIT)
    add(path, api.hear, methods=["GET"], **about)
