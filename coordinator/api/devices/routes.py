"""The table of the device protocol's routes, all authenticated, and their router. Spec: docs/spec/wire.md §1.

`DeviceRouter` matches requests by it, and the OpenAPI document is made from it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api.authentication import Authenticator
from coordinator.api.devices.endpoints import NUMBER, DeviceApi
from coordinator.api.devices.reports import ReportApi
from coordinator.api.http import answer_error
from coordinator.api.openapi import ANYWHERE, BYTES, EXAMPLES, Answer, ApiDocument
from coordinator.errors import Refusal
from fedcore.errors import RequestError
from fedcore.wire import messages
from fedcore.wire.messages import PROBLEMS

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
                 about({200: Answer("Its release", (messages.ReleasedModel,))}, ("no-model",))),
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
