"""The OpenAPI documents of both APIs: messages, header fields and problems of a route, whichever router matches it.

Messages are read and written by msgspec, which also makes their schemas.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec
from fastapi import FastAPI

from coordinator.api.examples import EXAMPLES, FIELDS
from fedcore.wire import messages
from fedcore.wire.problems import PROBLEM_FIELD, PROBLEM_TYPE, PROBLEMS, URN, Problem, ProblemKind

BYTES = "application/octet-stream"
ANYWHERE = ("too-many-requests", "internal", "unavailable")
"""Problems of any request to the device port."""
_REFERENCE = "#/components/schemas/{name}"

BodyType: TypeAlias = Any
"""The type of a body: a message's, for JSON, or a media type, for bytes."""


class Answer(NamedTuple):
    """An answer in a document: its meaning, the types that its body may have, and its header fields."""

    meaning: str
    bodies: tuple[BodyType, ...] = ()
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiDocument:
    """The parts that all routes of an API share.

    problems: its problem types by name. everywhere: those that any of its routes may answer with. messages: types
    whose schemas the document has, with the types that they refer to. signatures: schemes by which every request is
    signed; a scheme that FastAPI finds in a route's dependencies is none of them.
    """

    problems: Mapping[str, ProblemKind]
    everywhere: tuple[str, ...]
    messages: tuple[BodyType, ...] = ()
    signatures: Mapping[str, Any] = field(default_factory=dict)

    def operation(
        self,
        answers: Mapping[int, Answer],
        problems: tuple[str, ...] = (),
        *,
        takes: BodyType | None = None,
        fields: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """A route in the document: its answers, the usual one first, its problems, its body, its header fields."""
        about: dict[str, Any] = {"responses": _answers(answers) | self._refusals((*problems, *self.everywhere))}
        if self.signatures:
            about["security"] = [{name: []} for name in self.signatures]
        if takes is not None:
            about["requestBody"] = {"required": True, "content": _content((takes,))}
        if fields:
            about["parameters"] = [{"name": name, "in": "header", **_field(name)} for name in fields]
        return about

    def route(
        self, answers: Mapping[int, Answer], problems: tuple[str, ...] = (), *, takes: BodyType | None = None
    ) -> dict[str, Any]:
        """The same as arguments of a route of the framework."""
        extra = self.operation(answers, problems, takes=takes)
        return {"status_code": next(iter(answers)), "responses": extra.pop("responses"), "openapi_extra": extra}

    def _refusals(self, slugs: tuple[str, ...]) -> dict[str, Any]:
        """Problem documents by status, with an example of each type."""
        responses: dict[str, Any] = {}
        for slug in slugs:
            kind = self.problems[slug]
            examples: dict[str, Any] = {}
            content = {PROBLEM_TYPE: {"schema": _schema(Problem), "examples": examples}}
            headers = {PROBLEM_FIELD: _field(PROBLEM_FIELD)}
            entry = responses.setdefault(str(kind.status), {"description": "", "content": content, "headers": headers})
            entry["description"] = "; ".join(filter(None, (entry["description"], slug)))
            example = Problem(URN + slug, kind.title, kind.status, f"{kind.title}.")
            entry["content"][PROBLEM_TYPE]["examples"][slug] = {"value": _plain(example)}
        return responses

    def complete(self, app: FastAPI, paths: Mapping[str, Any] | None = None) -> None:
        """Add the schemas of the messages, the schemes of signatures, and `paths`, to an application's document."""
        generate = app.openapi

        def openapi() -> dict[str, Any]:
            document = generate()
            document["paths"] = {**(paths or {}), **document["paths"]}
            _, schemas = msgspec.json.schema_components((*self.messages, Problem), ref_template=_REFERENCE)
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas)
            components.setdefault("securitySchemes", {}).update(self.signatures)
            return document

        app.openapi = openapi  # type: ignore[method-assign]


HEALTH = ApiDocument(problems=PROBLEMS, everywhere=ANYWHERE)
"""Routes that both ports have, and that anybody may ask."""


def _answers(answers: Mapping[int, Answer]) -> dict[str, Any]:
    return {
        str(status): {
            "description": answer.meaning,
            "content": _content(answer.bodies),
            "headers": {name: _field(name) for name in answer.fields},
        }
        for status, answer in answers.items()
    }


def _content(bodies: tuple[BodyType, ...]) -> dict[str, Any]:
    """Bodies by media type."""
    media = [body for body in bodies if isinstance(body, str)]
    content: dict[str, Any] = {name: {"schema": {"type": "string", "format": "binary"}} for name in media}
    types = [body for body in bodies if not isinstance(body, str)]
    if types:
        schemas = [_schema(body) for body in types]
        content["application/json"] = {
            "schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas},
            "examples": {body.__name__: {"value": _plain(EXAMPLES[body])} for body in types if body in EXAMPLES},
        }
    return content


def _field(name: str) -> dict[str, Any]:
    about = FIELDS[name]
    return {
        "description": about.meaning,
        "schema": {"type": "string", "pattern": about.pattern},
        "example": about.example,
    }


@functools.cache
def _schema(body: BodyType) -> dict[str, Any]:
    """The schema of a type. Cached: msgspec looks through all that the type refers to, and routes share few types."""
    (schema,), _ = msgspec.json.schema_components([body], ref_template=_REFERENCE)
    return schema


def _plain(message: msgspec.Struct) -> Any:
    """A message as it is in JSON."""
    return msgspec.json.decode(messages.encode(message))
