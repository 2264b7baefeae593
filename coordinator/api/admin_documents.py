"""Problem types of the admin API, and the schemas of its OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.http import PROBLEM_OF
from coordinator.errors import BadToken, InvalidTask, RoleLacking, StoreConflict, TaskEnded, UnknownRound, UnknownTask
from coordinator.rules.progress import Progress
from coordinator.rules.state import RoundRecord, SessionShape, Task, Transition
from coordinator.rules.task_settings import TaskSettings
from fedcore.bundle import Manifest
from fedcore.errors import FedcoreError
from fedcore.wire import messages
from fedcore.wire.problems import PROBLEM_TYPE, PROBLEMS, URN, Problem, ProblemKind

_PREFIX = "#/components/schemas/"


class NewTask(msgspec.Struct, frozen=True):
    """`POST /admin/v1/tasks`: a bundle, whose blobs were uploaded before, and how it is to run."""

    manifest: Manifest
    settings: TaskSettings


_ERRORS: dict[type[Exception], str] = {
    BadToken: "bad-token",
    RoleLacking: "role-lacking",
    UnknownTask: "unknown-task",
    UnknownRound: "unknown-round",
    TaskEnded: "task-ended",
    InvalidTask: "invalid-task",
    StoreConflict: "unavailable",
    FedcoreError: "invalid-bundle",
}
_SHARED = (
    "malformed-message", "unknown-resource", "method-not-allowed", "unknown-blob", "too-large", "digest-mismatch",
    "internal", "unavailable",
)  # fmt: skip
ADMIN_PROBLEMS = {
    "bad-token": ProblemKind(401, "The token is missing, none of this coordinator, or revoked"),
    "role-lacking": ProblemKind(403, "The token's role does not allow this"),
    "unknown-task": ProblemKind(404, "No task has this id"),
    "unknown-round": ProblemKind(404, "The task has no such round, or it was not committed"),
    "task-ended": ProblemKind(409, "The task is over, or not in a state that this starts from"),
    "invalid-task": ProblemKind(422, "The settings contradict each other, or do not fit the bundle"),
    "invalid-bundle": ProblemKind(422, "The bundle is damaged, or its algorithm or signature is not good"),
} | {slug: PROBLEMS[slug] for slug in _SHARED}


def install_admin_problems(app: FastAPI) -> None:
    """Make a problem document of what the store and bundles raise."""

    async def refusal(request: Request, error: Exception) -> Response:
        request.scope[PROBLEM_OF] = slug = next(slug for kind, slug in _ERRORS.items() if isinstance(error, kind))
        kind = ADMIN_PROBLEMS[slug]
        headers = {"WWW-Authenticate": "Bearer"} if kind.status == 401 else None
        document = Problem(URN + slug, kind.title, kind.status, str(error))
        return Response(messages.encode(document), kind.status, headers, media_type=PROBLEM_TYPE)

    for kind in _ERRORS:
        app.add_exception_handler(kind, refusal)


def body(media_type: str, message: type | None = None) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads a message, or bytes."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": _schema(message)}}}}


def answers(status: int, wording: str, content: dict[str, Any] | None, *problems: str) -> dict[int | str, Any]:
    """The `responses` of a route: its answer by media type, and the problem types that it may refuse with."""
    schemas = {media_type: {"schema": _schema(kind)} for media_type, kind in (content or {}).items()}
    found: dict[int | str, Any] = {status: {"description": wording, "content": schemas}}
    for slug in (*problems, "internal", "unavailable"):
        kind = ADMIN_PROBLEMS[slug]
        earlier = found.get(kind.status, {}).get("description")
        wording = f"{earlier}; {slug}" if earlier else slug
        found[kind.status] = {"description": wording, "content": {PROBLEM_TYPE: {"schema": _schema(Problem)}}}
    return found


def describe_admin_messages(app: FastAPI) -> None:
    """Add the messages' schemas to the application's OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        kinds = (NewTask, Problem, Progress, RoundRecord, SessionShape, Task, Transition)
        _, schemas = msgspec.json.schema_components(kinds, ref_template=_PREFIX + "{name}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(message: Any) -> dict[str, Any]:
    if message is None:
        return {"type": "string", "format": "binary"}
    (schema,), _ = msgspec.json.schema_components([message], ref_template=_PREFIX + "{name}")
    return schema
