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
from coordinator.api.devices import DeviceApi
from coordinator.api.openapi import BYTES, Said, signed_route
from coordinator.api.reports import ReportApi
from fedcore.wire.messages import Abort, Accepted, Assignment, CheckIn, Enrol, Enrolled, Receipt, Rejected, Willing

_BODY = ("malformed-message", "too-large", "digest-mismatch")
"""What any request with a body may be refused with."""
_OWN = ("unknown-assignment", "foreign-assignment")
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
        """What answers a request."""
        admit, endpoint = self.admit, self.endpoint

        async def handle(request: Request) -> Response:
            await admit(request)
            answer: Response = await endpoint(request=request, **request.path_params)
            return answer

        return handle


def add_device_routes(router: APIRouter, api: DeviceApi, reports: ReportApi, authenticator: Authenticator) -> None:
    """Add the routes of both to `router`: its own ones, since to look through a router within a router costs time."""
    add = partial(router.add_api_route, tags=["devices"], route_class_override=_behind(authenticator.device))
    _working(add, api)
    _reporting(add, api, reports)
    _aggregating(add, api)
    _newcomers(
        partial(router.add_api_route, tags=["devices"], route_class_override=_behind(authenticator.newcomer)), api
    )


def _behind(admit: Callable[[Request], Awaitable[None]]) -> type[DeviceRoute]:
    return type("DeviceRoute", (DeviceRoute,), {"admit": staticmethod(admit)})


def _newcomers(add: Add, api: DeviceApi) -> None:
    """Where devices enrol."""
    said = {200: Said("Enrolled", (Enrolled,))}
    about = signed_route(said, (*_BODY, "not-attested"), takes=Enrol, fields=_DIGEST)
    add("/v1/devices", api.enrol, methods=["POST"], **about)


def _working(add: Add, api: DeviceApi) -> None:
    """Where devices offer themselves, and fetch what they need."""
    outcome = {200: Said("Outcome", (Accepted, Rejected))}
    about = signed_route(outcome, (*_BODY, "unknown-population"), takes=CheckIn, fields=_DIGEST)
    add("/v1/populations/{population}/checkins", api.check_in, methods=["POST"], **about)
    assigned = {200: Said("Outcome", (Assignment, Rejected), _WAITED)}
    problems = (*_BODY, "unknown-session", "foreign-session")
    about = signed_route(assigned, problems, takes=Willing, fields=(*_DIGEST, *_WAIT))
    add("/v1/sessions/{session}/assignments", api.assign, methods=["POST"], **about)
    served = {
        200: Said("The bytes", (BYTES,), ("ETag",)),
        206: Said("Those that were asked for", (BYTES,), ("ETag", "Content-Range")),
        304: Said("The device has it", (), ("ETag",)),
    }
    fields = ("Range", "If-Range", "If-None-Match")
    about = signed_route(served, ("unknown-blob", "range-not-satisfiable"), fields=fields)
    add("/v1/blobs/{sha256}", api.blob, methods=["GET"], **about)


def _reporting(add: Add, api: DeviceApi, reports: ReportApi) -> None:
    """Where devices are there, and assignments end."""
    held = {204: Said("Its report is still needed", (), _WAITED)}
    about = signed_route(held, (*_OWN, "no-longer-needed"), fields=_WAIT)
    add("/v1/assignments/{assignment}", api.hold, methods=["GET"], status_code=204, **about)
    path = "/v1/assignments/{assignment}/report"
    ending = (*_BODY, *_OWN, "conflicting-report")
    counting = (*ending, "no-longer-needed", "invalid-report")
    counted = {200: Said("Counted, once", (Receipt,))}
    add(path, reports.put, methods=["PUT"], **signed_route(counted, counting, takes=BYTES, fields=_DIGEST))
    here = {204: Said("How much is here", (), ("Upload-Offset", "Upload-Complete"))}
    about = signed_route(here, (*_OWN, "no-longer-needed"))
    add(path, reports.head, methods=["HEAD"], status_code=204, **about)
    more = {204: Said("More is wanted", (), ("Upload-Offset", "Upload-Complete"))}
    about = signed_route(
        counted | more,
        (*counting, "mismatching-offset"),
        takes="application/partial-upload",
        fields=(*_DIGEST, *_UPLOAD),
    )
    add(path, reports.patch, methods=["PATCH"], **about)
    about = signed_route({204: Said("Given up")}, ending, takes=Abort, fields=_DIGEST)
    add("/v1/assignments/{assignment}:abort", api.abort, methods=["POST"], status_code=204, **about)


def _aggregating(add: Add, api: DeviceApi) -> None:
    """Where devices exchange the messages of secure aggregation."""
    path = "/v1/assignments/{assignment}/secagg/{number}"
    heard = {200: Said("The next message", (BYTES,), _WAITED), 204: Said("It is not there yet", (), _WAITED)}
    taken = (*_BODY, *_OWN, "no-longer-needed", "conflicting-report", "unusable-message")
    about = signed_route(heard, taken, takes=BYTES, fields=(*_DIGEST, *_WAIT))
    add(path, api.say, methods=["PUT"], **about)
    about = signed_route(heard, ("malformed-message", *_OWN, "no-longer-needed"), fields=_WAIT)
    add(path, api.hear, methods=["GET"], **about)
