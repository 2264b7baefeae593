"""The OpenAPI documents of both APIs. FastAPI knows the routes; this adds messages, header fields and problems.

Messages are read and written by msgspec, which also makes their schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI

from coordinator.api.examples import EXAMPLES, FIELDS
from fedcore.wire import messages
from fedcore.wire.problems import PROBLEM_FIELD, PROBLEM_TYPE, PROBLEMS, Problem, problem

BYTES = "application/octet-stream"
SIGNATURES = (
    "unsigned", "malformed-signature", "unknown-device", "forged-signature", "stale-signature", "replayed-signature",
)  # fmt: skip
"""What any request of a device may be refused with."""
ANYWHERE = ("too-many-requests", "internal", "unavailable")
"""What any request at all may be refused with."""
_PREFIX = "#/components/schemas/"
_SECURITY = {
    "device": {
        "type": "http",
        "scheme": "signature",
        "description": "RFC 9421: the fields Signature-Input and Signature, as docs/spec/wire.md §10 says. "
        "At enrolment, keyid is the public key itself.",
    }
}

Kind = type[msgspec.Struct] | str
"""What a body is: a message, or bytes of a media type."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: what it means, what its body may be, and the header fields that it has."""

    wording: str
    kinds: tuple[Kind, ...] = ()
    fields: tuple[str, ...] = ()


def signed_route(
    answers: Mapping[int, Said], problems: tuple[str, ...], *, takes: Kind | None = None, fields: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What a device's route is added with: its body, the header fields that it reads, its answers and problems."""
    extra: dict[str, Any] = {"security": [{"device": []}]}
    if takes is not None:
        extra["requestBody"] = {"required": True, "content": _content((takes,))}
    if fields:
        extra["parameters"] = [{"name": name, "in": "header", **_field(name)} for name in fields]
    said: dict[int | str, Any] = {
        status: {
            "description": one.wording,
            "content": _content(one.kinds),
            "headers": {name: _field(name) for name in one.fields},
        }
        for status, one in answers.items()
    }
    return {"openapi_extra": extra, "responses": said | _refusals((*SIGNATURES, *problems, *ANYWHERE))}


def answers(status: int, wording: str, *, problems: tuple[str, ...]) -> dict[int | str, Any]:
    """The `responses` of a route that nobody signs for."""
    return {status: {"description": wording}} | _refusals((*problems, *ANYWHERE))


def describe_messages(app: FastAPI) -> None:
    """Add the messages' schemas, and what signs requests, to the application's OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, schemas = msgspec.json.schema_components((*EXAMPLES, Problem), ref_template=_PREFIX + "{name}")
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(schemas)
        components["securitySchemes"] = _SECURITY
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _refusals(slugs: tuple[str, ...]) -> dict[int | str, Any]:
    """Problem documents by status, with an example of each type."""
    found: dict[int | str, Any] = {}
    for slug in slugs:
        kind = PROBLEMS[slug]
        entry = found.setdefault(
            kind.status,
            {
                "description": "",
                "content": {PROBLEM_TYPE: {"schema": _schema(Problem), "examples": {}}},
                "headers": {PROBLEM_FIELD: _field(PROBLEM_FIELD)},
            },
        )
        entry["description"] = "; ".join(filter(None, (entry["description"], slug)))
        entry["content"][PROBLEM_TYPE]["examples"][slug] = {"value": _plain(problem(slug, f"{kind.title}."))}
    return found


def _content(kinds: tuple[Kind, ...]) -> dict[str, Any]:
    """Bodies by media type."""
    media = [kind for kind in kinds if isinstance(kind, str)]
    found: dict[str, Any] = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in media}
    structs = [kind for kind in kinds if not isinstance(kind, str)]
    if structs:
        schemas = [_schema(kind) for kind in structs]
        found["application/json"] = {
            "schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas},
            "examples": {kind.__name__: {"value": _plain(EXAMPLES[kind])} for kind in structs},
        }
    return found


def _field(name: str) -> dict[str, Any]:
    field = FIELDS[name]
    return {
        "description": field.meaning,
        "schema": {"type": "string", "pattern": field.pattern},
        "example": field.example,
    }


def _schema(message: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": _PREFIX + message.__name__}


def _plain(message: msgspec.Struct) -> Any:
    """A message as it is in JSON."""
    return msgspec.json.decode(messages.encode(message))
