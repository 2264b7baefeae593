"""The dashboard's routes: which address is which page, form, stream or download."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from fastapi.sse import EventSourceResponse

from coordinator.api.admin.routes import Access
from coordinator.api.service import Service
from coordinator.dashboard.actions import Actions, Downloads
from coordinator.dashboard.models import ModelForms
from coordinator.dashboard.new_task import NewTaskForm
from coordinator.dashboard.pages import Pages, Streams
from coordinator.dashboard.rendering import Renderer, WebSessions


def dashboard_router(service: Service, access: Access) -> APIRouter:
    """The routes of the pages, which `/openapi.json` does not describe."""
    sessions, renderer = WebSessions(service, access), Renderer()
    streams = Streams(service, sessions, renderer)
    pages, actions = Pages(service, sessions, renderer, streams), Actions(service, sessions, renderer)
    models = ModelForms(service, sessions, renderer)
    downloads, new = Downloads(service, sessions, renderer), NewTaskForm(service, sessions, renderer)
    router = APIRouter(include_in_schema=False)
    stream: dict[str, Any] = {
        "response_class": EventSourceResponse,
        "dependencies": [Depends(sessions.require_viewer), Depends(streams.watching)],
    }
    for path, page in (
        ("/", pages.overview),
        ("/compare", pages.compare),
        ("/docs", pages.documentation),
        ("/new", new.form),
        ("/models", pages.models),
        ("/populations/{population}", pages.population),
        ("/populations/{population}/models/{name}", pages.model),
        ("/populations/{population}/models/{name}/{verb}", models.ask),
        ("/login", pages.login),
        ("/static/{name}", pages.static),
        ("/tasks/{task}", pages.task),
        ("/tasks/{task}/rounds", pages.rounds),
        ("/tasks/{task}/rounds/{number}/{attempt}", pages.round),
        ("/tasks/{task}/settings", pages.settings),
        ("/tasks/{task}/log", pages.log),
        ("/tasks/{task}/model", downloads.model),
        ("/tasks/{task}/answer", downloads.answer),
        ("/tasks/{task}/plan", downloads.plan),
        ("/tasks/{task}/certificate", downloads.certificate),
        ("/tasks/{task}/privacy-certificate", downloads.privacy_certificate),
    ):
        router.add_api_route(path, page)
    router.add_api_route("/events", pages.overview_events, **stream)
    router.add_api_route("/tasks/{task}/events", pages.task_events, **stream)
    router.add_api_route("/tasks/{task}/{verb}", pages.confirm)
    for path, act in (
        ("/login", actions.login),
        ("/logout", actions.logout),
        ("/new", new.create),
        ("/populations/{population}/models/{name}/{verb}", models.act),
        ("/tasks/{task}/{verb}", actions.change),
    ):
        router.add_api_route(path, act, methods=["POST"])
    router.add_api_route("/new/blobs/{sha256}", new.upload, methods=["PUT"])
    return router
