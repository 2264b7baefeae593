"""Downloads from the dashboard: models, answers, plans and certificates of tasks."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.openapi import BYTES
from coordinator.api.service import Service
from coordinator.dashboard.forms import Number
from coordinator.dashboard.rendering import HEADERS
from coordinator.dashboard.web_sessions import WebSessions
from coordinator.errors import BadToken
from coordinator.rules.entities import Token
from fedcore.questions.reading import as_csv

_JSON = "application/json"


class Downloads:
    """Files of a task, for those who may view pages. Errors are those of the admin API."""

    def __init__(self, service: Service, sessions: WebSessions) -> None:
        self._store = service.store
        self._sessions = sessions

    def model(self, request: Request, task: str, round: Number | None = None) -> Response:
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

    def privacy_certificate(self, request: Request, task: str, round: Number | None = None) -> Response:
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
    return Response(data, headers=HEADERS | {"Content-Disposition": f'attachment; filename="{name}"'}, media_type=kind)
