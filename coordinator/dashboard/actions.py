"""Forms of the dashboard: login and logout, and what an operator does with a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias

from fastapi import Depends
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.service import Service
from coordinator.api.tokens import authenticate
from coordinator.dashboard.forms import SHOWN, read_fields, status_of
from coordinator.dashboard.rendering import Renderer, page_of, redirect
from coordinator.dashboard.web_sessions import COOKIE, WebSessions
from coordinator.errors import BadToken, ForgedForm, RoleLacking, UnknownRound
from coordinator.rules.entities import Role

_FORM_BYTES = 4096
Act: TypeAlias = Callable[[str, str], object]


async def _form(request: Request) -> dict[str, str]:
    return await read_fields(request, _FORM_BYTES)


Fields: TypeAlias = Annotated[dict[str, str], Depends(_form)]
"""The fields of a short form."""


class Actions:
    """What forms do. Each asks for the CSRF token of the session, and those that change tasks for an operator."""

    def __init__(self, service: Service, sessions: WebSessions, renderer: Renderer) -> None:
        self._store = service.store
        self._sessions = sessions
        self._renderer = renderer

    def login(self, request: Request, fields: Fields) -> Response:
        """Begin a session for the token in the form."""
        visitor = self._sessions.visitor(request)
        try:
            self._sessions.check_form(visitor, fields)
            token = authenticate(self._store.database, fields.get("token", ""))
            token.demand(Role.VIEWER)
        except ForgedForm as error:
            return self._renderer.login(request, visitor, 403, wrong=str(error))
        except (BadToken, RoleLacking) as error:
            return self._renderer.login(request, visitor, 401, wrong=f"You are not logged in: {error}.")
        response = redirect("/")
        self._sessions.begin(token).give(request, response)
        return response

    def logout(self, request: Request, fields: Fields) -> Response:
        """End the session, in this browser and in any other that has its cookie."""
        visitor = self._sessions.visitor(request)
        try:
            self._sessions.check_form(visitor, fields)
        except ForgedForm as error:
            return self._renderer.problem(request, visitor, 403, str(error))
        self._sessions.end(request)
        response = redirect("/")
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response

    def change(self, request: Request, task: str, verb: str, fields: Fields) -> Response:
        """Pause, resume, cancel or roll back a task."""
        visitor = self._sessions.visitor(request)
        if visitor.token is None:
            return self._renderer.login(request, visitor)
        try:
            self._sessions.check_form(visitor, fields)
            visitor.token.demand(Role.OPERATOR)
            self._act(verb, fields)(task, visitor.token.signature)
        except SHOWN as error:
            return self._renderer.problem(request, visitor, status_of(error), str(error), page_of(task))
        return redirect(page_of(task))

    def _act(self, verb: str, fields: dict[str, str]) -> Act:
        """What a verb does to a task, for somebody. Raises UnknownRound."""
        if verb == "rollback":
            number = _round_number(fields.get("round", ""))
            return lambda task, by: self._store.roll_back(task, number, by)
        acts: dict[str, Act] = {
            "pause": self._store.pause, "resume": self._store.resume, "cancel": self._store.cancel
        }  # fmt: skip
        if verb not in acts:
            raise HTTPException(404, "Not Found")
        return acts[verb]


def _round_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UnknownRound(f"{text!r} is not a round's number: choose one whose model is kept")
    return int(text)
