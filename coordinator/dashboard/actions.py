"""Forms of the dashboard and downloads from it: login, what an operator does with a task, files of tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

import msgspec
from fastapi import Depends
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.openapi import BYTES
from coordinator.api.tokens import authenticate
from coordinator.dashboard import rendering
from coordinator.errors import BadToken, ForgedForm, RoleLacking, UnknownRound
from coordinator.rules.entities import Role, Token
from fedcore.questions.answer import as_csv

_FORM_BYTES = 4096
Act: TypeAlias = Callable[[str, str], object]


async def _form(request: Request) -> dict[str, str]:
    return await rendering.read_fields(request, _FORM_BYTES)


Fields: TypeAlias = Annotated[dict[str, str], Depends(_form)]
"""The fields of a short form."""


class Actions(rendering.Endpoints):
    """What forms do. Each asks for the CSRF token of the session, and those that change tasks for an operator."""

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
        response = rendering.redirect("/")
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
        response = rendering.redirect("/")
        response.delete_cookie(rendering.COOKIE, httponly=True, samesite="strict")
        return response

    def change(self, request: Request, task: str, verb: str, fields: Fields) -> Response:
        """Pause, resume, cancel or roll back a task."""

        def act(_: rendering.Visitor, by: str) -> None:
            self._act(verb, fields)(task, by)

        return self._operate(request, fields, rendering.page_of(task), act)

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


_JSON = "application/json"


class Downloads(rendering.Endpoints):
    """Files of a task, for those who may view pages. Errors are those of the admin API."""

    def model(self, request: Request, task: str, round: rendering.Number | None = None) -> Response:
        """The model after a committed round, by default the last; the audit log says who read it."""
        data = self._store.model(task, round, self._viewer(request).signature)
        return _file(data, BYTES, f"{task}{'' if round is None else f'-round-{round}'}.safetensors")

    def plan(self, request: Request, task: str) -> Response:
        """The plan that devices execute."""
        self._viewer(request)
        return _file(self._store.blobs.get(self._store.task(task).plan_sha256), _JSON, f"{task}-plan.json")

    def certificate(self, request: Request, task: str) -> Response:
        """The proof, made at export, that the plan's graphs compute what they should."""
        self._viewer(request)
        data = self._store.blobs.get(self._store.task(task).certificate_sha256)
        return _file(data, _JSON, f"{task}-certificate.json")

    def privacy_certificate(self, request: Request, task: str, round: rendering.Number | None = None) -> Response:
        """The privacy certificate of the model after a round, by default the last, with its ledger."""
        data = msgspec.json.encode(self._store.certificate(task, round, self._viewer(request).signature))
        return _file(data, _JSON, f"{task}.safetensors.privacy.json")

    def answer(self, request: Request, task: str, form: Literal["csv", "json"] = "json") -> Response:
        """The answer to the question of a task."""
        found = self._store.answer(task, self._viewer(request).signature)
        if form == "csv":
            text = as_csv(found.columns, found.rows, found.errors)
            return _file(text.encode(), "text/csv; charset=utf-8", f"{task}-answer.csv")
        return _file(msgspec.json.encode(found), _JSON, f"{task}-answer.json")

    def _viewer(self, request: Request) -> Token:
        """Raises BadToken."""
        token = self._sessions.visitor(request).token
        if token is None:
            raise BadToken("log in first")
        return token


def _file(data: bytes, kind: str, name: str) -> Response:
    # A task's id is hexadecimal digits, so that the name needs no quoting.
    return Response(
        data, headers=rendering.HEADERS | {"Content-Disposition": f'attachment; filename="{name}"'}, media_type=kind
    )
