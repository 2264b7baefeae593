"""Pages of populations: their devices, what those run, when they came, how far, and their tasks."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.page import PAGE
from coordinator.api.service import Service
from coordinator.dashboard.join_links import JoinLink, join_link
from coordinator.dashboard.rendering import Renderer
from coordinator.dashboard.views import population_page
from coordinator.dashboard.web_sessions import WebSessions
from coordinator.errors import UnknownPopulation
from coordinator.rules.entities import Task


class PopulationPages:
    """The endpoint of these pages."""

    def __init__(self, service: Service, sessions: WebSessions, renderer: Renderer) -> None:
        self._database = service.store.database
        self._check_ins = service.check_ins
        self._settings = service.settings
        self._membership = service.membership
        self._sessions = sessions
        self._renderer = renderer

    def population(self, request: Request, population: str) -> Response:
        """One population."""
        visitor = self._sessions.visitor(request)
        if visitor.token is None:
            return self._renderer.login(request, visitor)
        try:
            with self._database.reading() as records:
                seen = population_page(records, population, self._check_ins.of(population, records.at))
        except UnknownPopulation as error:
            return self._renderer.problem(request, visitor, 404, str(error))
        join = self._join_link(population, [line.task for line in seen["lines"]])
        return self._renderer.page(request, visitor, "population.html", join=join, **seen)

    def _join_link(self, population: str, tasks: Iterable[Task]) -> JoinLink | None:
        """The link by which browsers join; None where no page is served."""
        if self._settings.page is None:
            return None
        return join_link(self._settings.page_url or f"{self._membership.url}{PAGE}/", population, tasks)
