"""The dashboard's routes: read-only pages, kept live by server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from importlib.resources import files
from typing import Any, TypeAlias
from urllib.parse import parse_qs

import jinja2
from fastapi import APIRouter, Depends
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from coordinator.api.access import COOKIE, Access
from coordinator.api.limits import ConnectionLimit
from coordinator.api.service import Service
from coordinator.api.tokens import authenticate
from coordinator.dashboard.curves import HEIGHT, WIDTH
from coordinator.dashboard.views import date, populations, task_page
from coordinator.errors import BadToken, UnknownTask
from coordinator.rules.entities import Role
from coordinator.store.records import Records

Look: TypeAlias = Callable[[Records], dict[str, Any]]
_TICK_S = 1.0
_REDRAW_S = 5.0
"""The interval after which a page is drawn anew: it shows ages in seconds. And a row may become visible after another
one of a greater id, which was taken for the last."""
_MOST_STREAMS = 100
_LOGIN_BYTES = 4096
_SESSION_S = 12 * 3600
_STATIC = {
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
    "htmx-4.0.1.min.js": "text/javascript",
    "hx-sse-4.0.1.min.js": "text/javascript",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Pages:
    """The endpoints of the pages. Without a good token only the login is shown."""

    def __init__(self, service: Service, access: Access) -> None:
        self._database = service.store.database
        self._driver = service.driver
        self._metrics = service.metrics
        self._runtimes = service.runtimes
        self._access = access
        self._streams = ConnectionLimit(_MOST_STREAMS)
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("coordinator.dashboard"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals |= {"width": WIDTH, "height": HEIGHT, "date": date}

    def overview(self, request: Request) -> Response:
        """Every population and its tasks."""
        return self._page(request, "overview.html", self._overview)

    def task(self, request: Request, task: str) -> Response:
        """One task: its round, its funnel, its learning curves, its history."""
        return self._page(request, "task.html", lambda records: self._task(records, task))

    async def overview_events(self, request: Request) -> AsyncIterator[ServerSentEvent]:
        """The overview, again whenever something changed."""
        async for event in self._stream(request, "overview_live.html", self._overview):
            yield event

    async def task_events(self, request: Request, task: str) -> AsyncIterator[ServerSentEvent]:
        """A task's page, again whenever something changed."""
        async for event in self._stream(request, "task_live.html", lambda records: self._task(records, task)):
            yield event

    async def watching(self) -> AsyncIterator[None]:
        """Count an open page as long as it is. Raises Unavailable when as many are open as may be."""
        with self._streams.hold():
            yield

    async def login(self, request: Request) -> Response:
        """Take a viewer's token from the form, and keep it in a cookie that no script can read."""
        text = await _field(request, "token")
        try:
            token = await run_in_threadpool(authenticate, self._database, text)
        except BadToken:
            return self._html("login.html", 401, wrong="That is no token of this coordinator, or it was revoked.")
        if token.role is not Role.VIEWER:
            return self._html("login.html", 403, wrong="That is an operator's token. A page takes only a viewer's.")
        response = RedirectResponse("/", 303, headers=_HEADERS)
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, text, max_age=_SESSION_S, httponly=True, samesite="strict", secure=secure)
        return response

    def logout(self) -> Response:
        """Forget the cookie."""
        response = RedirectResponse("/", 303, headers=_HEADERS)
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response

    def static(self, name: str) -> Response:
        """A file that pages need."""
        if name not in _STATIC:
            raise HTTPException(404, "Not Found")
        data = files("coordinator.dashboard").joinpath("static", name).read_bytes()
        return Response(data, media_type=_STATIC[name], headers=_HEADERS | {"Cache-Control": "max-age=3600"})

    def _page(self, request: Request, template: str, look: Look) -> Response:
        who = self._access.page_viewer(request)
        if who is None:
            return self._html("login.html", 401, wrong="")
        try:
            with self._database.reading() as records:
                seen = look(records)
        except UnknownTask as error:
            return self._html("missing.html", 404, what=str(error))
        return self._html(template, 200, who=who, **seen)

    async def _stream(self, request: Request, template: str, look: Look) -> AsyncIterator[ServerSentEvent]:
        last: object = None
        drawn_at, ending = -_REDRAW_S, False
        with suppress(UnknownTask):
            # Asked again every time: a token that was revoked sees nothing more.
            while not ending and await run_in_threadpool(self._access.may_view_pages, request):
                ending = self._driver.draining  # the last drawing says so
                if ending or time.monotonic() - drawn_at >= _REDRAW_S:
                    last = None
                version, html = await run_in_threadpool(self._fragment, template, look, last)
                if version != last:
                    yield ServerSentEvent(raw_data=html)
                    drawn_at = time.monotonic()
                last = version
                await asyncio.sleep(0 if ending else _TICK_S)

    def _fragment(self, template: str, look: Look, last: object) -> tuple[object, str]:
        with self._database.reading() as records:
            version = (records.overview.version(), records.observations.version(), self._waiting())
            if version == last:
                return version, ""
            return version, self._templates.get_template(template).render(look(records))

    def _overview(self, records: Records) -> dict[str, Any]:
        return {
            "populations": populations(records),
            "waiting": self._waiting(),
            "devices": records.devices.counts(),
            "runtimes": self._runtimes.counts(),
            "draining": self._driver.draining,
        }

    def _task(self, records: Records, task: str) -> dict[str, Any]:
        return {"page": task_page(records, task)}

    def _waiting(self) -> int:
        return int(self._metrics.registry.get_sample_value("muster_sessions_waiting") or 0)

    def _html(self, template: str, status: int, **seen: Any) -> Response:
        html = self._templates.get_template(template).render(seen)
        return Response(html, status, _HEADERS, media_type="text/html")


def dashboard_router(service: Service, access: Access) -> APIRouter:
    """The routes of the pages, which `/openapi.json` does not describe."""
    pages = Pages(service, access)
    router = APIRouter(include_in_schema=False)
    stream: dict[str, Any] = {
        "response_class": EventSourceResponse,
        "dependencies": [Depends(access.require_page_viewer), Depends(pages.watching)],
    }
    router.add_api_route("/", pages.overview)
    router.add_api_route("/events", pages.overview_events, **stream)
    router.add_api_route("/tasks/{task}", pages.task)
    router.add_api_route("/tasks/{task}/events", pages.task_events, **stream)
    router.add_api_route("/login", pages.login, methods=["POST"])
    router.add_api_route("/logout", pages.logout, methods=["POST"])
    router.add_api_route("/static/{name}", pages.static)
    return router


async def _field(request: Request, name: str) -> str:
    """One field of a form, "" when it is not there; a form that is too long has none."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _LOGIN_BYTES:
            return ""
    return parse_qs(data.decode(errors="replace")).get(name, [""])[0]
