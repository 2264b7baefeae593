"""A router for the device protocol's routes, on the device port and nowhere else.

The layers of a framework cost more than most of these routes do.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api.http import answer_error
from coordinator.errors import Refusal
from fedcore.errors import RequestError
from fedcore.wire.messages import RetryWindow

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

    def __init__(self, routes: Sequence[DeviceRoute], others: ASGIApp, retry: RetryWindow) -> None:
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
