"""The dashboard's routes: pages of this process and its store, kept live by server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.access import Access
from coordinator.api.service import Service
from coordinator.dashboard.actions import Actions
from coordinator.dashboard.downloads import Downloads
from coordinator.dashboard.rendering import HEADERS, Renderer
from coordinator.dashboard.streams import Look, Streams
from coordinator.dashboard.views import kept_models, populations, task_page
from coordinator.dashboard.web_sessions import WebSessions
from coordinator.errors import UnknownTask
from coordinator.store.records import Records

_STATIC = {
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
    "htmx-4.0.1.min.js": "text/javascript",
    "hx-sse-4.0.1.min.js": "text/javascript",
}


class Pages:
    """The endpoints of the pages. Without a good token only the login is shown."""

    def __init__(self, service: Service, sessions: WebSessions, renderer: Renderer, streams: Streams) -> None:
        self._service = service
        self._sessions = sessions
        self._renderer = renderer
        self._streams = streams

    def overview(self, request: Request) -> Response:
        """Every population and its tasks."""
        return self._page(request, "overview.html", self._overview)

    def task(self, request: Request, task: str) -> Response:
        """One task: its round, its funnel, its learning curves, its history."""
        return self._page(request, "task.html", lambda records: self._task(records, task))

    async def overview_events(self, request: Request) -> AsyncIterator[ServerSentEvent]:
        """The overview, again whenever something changed."""
        async for event in self._streams.follow(request, "overview_live.html", self._overview):
            yield event

    async def task_events(self, request: Request, task: str) -> AsyncIterator[ServerSentEvent]:
        """A task's page, again whenever something changed."""
        async for event in self._streams.follow(request, "task_live.html", lambda records: self._task(records, task)):
            yield event

    def confirm(self, request: Request, task: str, verb: str) -> Response:
        """Ask whether a task is to be cancelled, or to which model it is to go back."""
        if verb not in ("cancel", "rollback"):
            raise HTTPException(404, "Not Found")
        return self._page(request, f"{verb}.html", lambda records: kept_models(records, task))

    def login(self, request: Request) -> Response:
        """The form that asks for a token."""
        return self._renderer.login(request, self._sessions.visitor(request), 200)

    def static(self, name: str) -> Response:
        """A file that pages need."""
        if name not in _STATIC:
            raise HTTPException(404, "Not Found")
        data = files("coordinator.dashboard").joinpath("static", name).read_bytes()
        return Response(data, media_type=_STATIC[name], headers=HEADERS | {"Cache-Control": "max-age=3600"})

    def _page(self, request: Request, template: str, look: Look) -> Response:
        visitor = self._sessions.visitor(request)
        if visitor.token is None:
            return self._renderer.login(request, visitor)
        try:
            with self._service.store.database.reading() as records:
                seen = look(records)
        except UnknownTask as error:
            return self._renderer.problem(request, visitor, 404, str(error))
        return self._renderer.page(request, visitor, template, **seen)

    def _overview(self, records: Records) -> dict[str, Any]:
        waiting = self._service.metrics.registry.get_sample_value("muster_sessions_waiting")
        return {
            "populations": populations(records),
            "waiting": int(waiting or 0),
            "devices": records.devices.counts(),
            "runtimes": self._service.runtimes.counts(),
            "draining": self._service.driver.draining,
        }

    def _task(self, records: Records, task: str) -> dict[str, Any]:
        return {"page": task_page(records, task)}


def dashboard_router(service: Service, access: Access) -> APIRouter:
    """The routes of the pages, which `/openapi.json` does not describe."""
    sessions, renderer = WebSessions(service, access), Renderer()
    streams = Streams(service, sessions, renderer)
    pages, actions = Pages(service, sessions, renderer, streams), Actions(service, sessions, renderer)
    downloads = Downloads(service, sessions)
    router = APIRouter(include_in_schema=False)
    stream: dict[str, Any] = {
        "response_class": EventSourceResponse,
        "dependencies": [Depends(sessions.require_viewer), Depends(streams.watching)],
    }
    router.add_api_route("/", pages.overview)
    router.add_api_route("/events", pages.overview_events, **stream)
    router.add_api_route("/tasks/{task}", pages.task)
    router.add_api_route("/tasks/{task}/events", pages.task_events, **stream)
    router.add_api_route("/tasks/{task}/model", downloads.model)
    router.add_api_route("/tasks/{task}/plan", downloads.plan)
    router.add_api_route("/tasks/{task}/privacy-certificate", downloads.privacy_certificate)
    router.add_api_route("/tasks/{task}/{verb}", pages.confirm)
    router.add_api_route("/tasks/{task}/{verb}", actions.change, methods=["POST"])
    router.add_api_route("/login", pages.login)
    router.add_api_route("/login", actions.login, methods=["POST"])
    router.add_api_route("/logout", actions.logout, methods=["POST"])
    router.add_api_route("/static/{name}", pages.static)
    return router
