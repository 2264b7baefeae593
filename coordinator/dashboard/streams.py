"""Live pages: their main part again, as a server-sent event, whenever something changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, TypeAlias

from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from coordinator.api.limits import DRAWN_AT_ONCE, ConnectionLimit
from coordinator.api.service import Service
from coordinator.dashboard.rendering import Renderer
from coordinator.dashboard.web_sessions import Visitor, WebSessions
from coordinator.errors import Unavailable, UnknownTask
from coordinator.store.records.records import Records

Look: TypeAlias = Callable[[Records], dict[str, Any]]
"""What a page shows, from rows."""
_TICK_S = 1.0
_REDRAW_S = 5.0
"""The interval after which a page is drawn anew: it shows ages in seconds. And a row may become visible after another
one of a greater id, which was taken for the last."""
_MOST_STREAMS = 100


class Streams:
    """The streams of open pages."""

    def __init__(self, service: Service, sessions: WebSessions, renderer: Renderer) -> None:
        self._service = service
        self._sessions = sessions
        self._renderer = renderer
        self._open = ConnectionLimit(_MOST_STREAMS)
        self._turns = asyncio.Semaphore(DRAWN_AT_ONCE)

    async def watching(self) -> AsyncIterator[None]:
        """Count an open page as long as it is. Raises Unavailable when as many are open as may be."""
        with self._open.hold():
            yield

    async def follow(self, request: Request, template: str, look: Look) -> AsyncIterator[ServerSentEvent]:
        """The part of a page, again whenever something changed, until the session ends or the coordinator stops."""
        last: object = None
        drawn_at, ending = -_REDRAW_S, False
        with suppress(UnknownTask):
            while not ending:
                ending = self._service.driver.draining  # the last drawing says so
                if ending or time.monotonic() - drawn_at >= _REDRAW_S:
                    last = None
                with suppress(Unavailable):  # the page stays as it is until the database is back
                    async with self._turns:
                        # Asked again every time: a session whose token was revoked sees nothing more.
                        if not (visitor := await run_in_threadpool(self._sessions.visitor, request)).token:
                            return
                        version, html = await run_in_threadpool(self._fragment, template, look, visitor, last)
                    if version != last:
                        yield ServerSentEvent(raw_data=html)
                        drawn_at = time.monotonic()
                    last = version
                await asyncio.sleep(0 if ending else _TICK_S)

    def _fragment(self, template: str, look: Look, visitor: Visitor, last: object) -> tuple[object, str]:
        waiting = self._service.metrics.registry.get_sample_value("muster_sessions_waiting")
        with self._service.store.database.reading() as records:
            version = (records.overview.version(), records.observations.version(), waiting)
            if version == last:
                return version, ""
            return version, self._renderer.part(template, visitor, **look(records))
