"""What the OpenAPI document says about messages that msgspec, not FastAPI, reads and writes."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from fedcore.wire.messages import Abort, Accepted, Assignment, CheckIn, Enrol, Enrolled, Receipt, Rejected, Willing
from fedcore.wire.problems import PROBLEM_TYPE, PROBLEMS, Problem

SIGNATURES = (
    "unsigned", "malformed-signature", "unknown-device", "forged-signature", "stale-signature", "replayed-signature",
)  # fmt: skip
"""What any request of a device may be refused with."""
_PREFIX = "#/components/schemas/"
_MESSAGES = (Abort, Accepted, Assignment, CheckIn, Enrol, Enrolled, Problem, Receipt, Rejected, Willing)


def body(media_type: str, message: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads a message, or bytes."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": _schema(message)}}}}


def answers(status: int, wording: str, *kinds: type[msgspec.Struct], problems: tuple[str, ...]) -> dict[int | str, Any]:
    """The `responses` of a route: its answer, and the problem types that it may refuse with."""
    content = {"application/json": {"schema": {"anyOf": [_schema(kind) for kind in kinds]}}} if kinds else {}
    found: dict[int | str, Any] = {status: {"description": wording, "content": content}}
    for slug in (*problems, "too-many-requests", "internal", "unavailable"):
        kind = PROBLEMS[slug]
        earlier = found.get(kind.status, {}).get("description")
        wording = f"{earlier}; {slug}" if earlier else slug
        found[kind.status] = {"description": wording, "content": {PROBLEM_TYPE: {"schema": _schema(Problem)}}}
    return found


def signed_answers(
    status: int, wording: str, *kinds: type[msgspec.Struct], problems: tuple[str, ...]
) -> dict[int | str, Any]:
    """The `responses` of a route of devices, whose requests are signed."""
    return answers(status, wording, *kinds, problems=(*SIGNATURES, *problems))


def octets(wording: str) -> dict[str, Any]:
    """One of the `responses` of a route: bytes."""
    return {"description": wording, "content": {"application/octet-stream": {"schema": _schema(None)}}}


def empty(wording: str) -> dict[str, Any]:
    """One of the `responses` of a route, without a body."""
    return {"description": wording}


def describe_messages(app: FastAPI) -> None:
    """Add the messages' schemas to the application's OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, schemas = msgspec.json.schema_components(_MESSAGES, ref_template=_PREFIX + "{name}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(message: type[msgspec.Struct] | None) -> dict[str, Any]:
    return {"$ref": _PREFIX + message.__name__} if message else {"type": "string", "format": "binary"}
