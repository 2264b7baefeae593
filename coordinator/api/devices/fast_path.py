"""Device routes without the framework's layers, which cost more than the routes themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.api.devices.routes import DeviceRoute
from coordinator.errors import Refusal
from fedcore.errors import RequestError


class FastPath:
    """ASGI: answers the device routes of an application as that would, and passes everything else on to it."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        found = [route for route in app.routes if isinstance(route, DeviceRoute)]
        self._routes = [(route.path_regex, route.methods or set(), route, route.get_route_handler()) for route in found]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "http":
            for pattern, methods, route, handle in self._routes:
                if scope["method"] in methods and (found := pattern.match(scope["path"])):
                    scope["route"], scope["path_params"] = route, found.groupdict()
                    return await self._answer(handle, Request(scope, receive, send), send)
        return await self._app(scope, receive, send)

    async def _answer(self, handle: Callable[[Request], Awaitable[Response]], request: Request, send: Send) -> None:
        try:
            answer = await handle(request)
        except (Refusal, RequestError, ClientDisconnect) as error:
            kind = next(kind for kind in (Refusal, RequestError, ClientDisconnect) if isinstance(error, kind))
            answer = await self._problem(kind, request, error)
        except Exception as error:
            answer = await self._problem(Exception, request, error)
            await answer(request.scope, request.receive, send)
            raise  # for the server to log
        await answer(request.scope, request.receive, send)

    async def _problem(self, kind: type[Exception], request: Request, error: Exception) -> Response:
        answer = self._app.exception_handlers[kind](request, error)
        return await cast("Awaitable[Response]", answer)
