"""The OpenAPI documents of both APIs, with an example of every message and header field.

Messages are read and written by msgspec, which also makes their schemas.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec
from fastapi import FastAPI

from fedcore.conditions import StatedConditions
from fedcore.plan import BlobRef
from fedcore.release import Signed
from fedcore.signing import ModelRelease, Succession
from fedcore.wire import messages
from fedcore.wire.messages import PROBLEM_FIELD, PROBLEM_TYPE, PROBLEMS, URN, Problem, ProblemKind

_DIGEST = "sha-256=:uU0nuZNNPgilLlLX2n2r+sSE7+N6U4DukIj3rOLvzek=:"
_PLAN = BlobRef("b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9", 4711)
_SESSION, _ASSIGNMENT, _TASK = "1f8e2c40.Yx0hB1o4Qm8", "1f8e2c40.kq3Zp7vR2sA", "5d41402abc4b2a76"
_DEVICE = "9f86d081884c7d659a2feaa0c55ad015"
_RETRY = messages.RetryWindow(5.0, 30.0)
_KEY = hashlib.sha256(b"a public key").digest()

_MODEL = ModelRelease(
    population="phones",
    name="keyboard",
    number=2,
    plan=_PLAN,
    parameters=BlobRef(_PLAN.sha256, 80_000),
    counter=1,
    evaluation={"evaluate.accuracy": 0.91},
)
_SIGNED = Signed(
    msgspec.json.encode(_MODEL, order="sorted").decode(),
    "ed25519:6kqSy9eyp6CXFEWAvFgE7a8F7nzi5VvRFb1xBPmXgSg",
    "bSL8yxCfFzqTbJXq2vXw9Pj1VwQb1mH4mK9Zr1m0b3xWcYtq8n2n7Q3kE5s6u4JrS0aQdKp3yXb9c1h2f7ZzBg",
)

_EXAMPLES = (
    messages.Enrol(attestation=messages.Unattested()),
    messages.Enrolled(_DEVICE, messages.SecaggParties(Succession(_KEY), _KEY, "https://authority.example")),
    messages.CheckIn(
        capabilities=messages.StatedCapabilities(
            runtime="muster",
            version="0.1.0",
            engine="onnxruntime 1.31.0",
            formats=("onnx",),
            secagg=("SA1",),
            memory_mb=4096,
            keeps_vectors=True,
        ),
        examples={"default": 32},
        conditions=StatedConditions(charging=True, idle=True, battery=0.8, free_storage_mb=16384),
        models={"keyboard": 2},
        refused={"keyboard": 3},
        labels={"region": "eu"},
    ),
    messages.Accepted(
        _SESSION, (messages.Offer(task=_TASK, collection="default", min_examples=20, charging=True),), _RETRY
    ),
    messages.Rejected("no-task", _RETRY),
    messages.Willing(tasks=(_TASK,)),
    messages.Assignment(
        assignment=_ASSIGNMENT,
        task=_TASK,
        round=3,
        attempt=1,
        slot=7,
        seed=0,
        plan=_PLAN,
        checkpoint=BlobRef(_PLAN.sha256, 80_000),
        report_within_s=600.0,
        minimum=20,
        purpose="This task teaches a model to read digits.",
        target="region = eu",
    ),
    messages.Receipt(assignment=_ASSIGNMENT, task=_TASK, round=3, sha256=_PLAN.sha256),
    messages.Settled(counted=True, over=False),
    messages.Abort("plan-refused"),
    messages.ReleasedModel(_SIGNED),
)
EXAMPLES: dict[type[msgspec.Struct], msgspec.Struct] = {type(example): example for example in _EXAMPLES}
"""An example of each message."""

_SHA256 = r"^sha-256=:[A-Za-z0-9+/]{43}=:$"
_NUMBER = r"^[0-9]{1,15}$"
_WAIT = r"^wait=[0-9]{1,9}$"
_TAG = r'^"[0-9a-f]{64}"$'


class Field(NamedTuple):
    """A header field: its meaning, an example, and the pattern of its values."""

    meaning: str
    example: str
    pattern: str


FIELDS = {
    "Content-Digest": Field("SHA-256 of the body (RFC 9530); signed", _DIGEST, _SHA256),
    "Prefer": Field("how many seconds the answer may be held back (RFC 7240)", "wait=30", _WAIT),
    "Preference-Applied": Field("how long it was at most", "wait=30", _WAIT),
    "Range": Field("the bytes that are wanted", "bytes=1000-", r"^bytes=[0-9]*-[0-9]*$"),
    "If-Range": Field("only of the blob with this ETag", f'"{_PLAN.sha256}"', _TAG),
    "If-None-Match": Field("not if the device has it", f'"{_PLAN.sha256}"', _TAG),
    "ETag": Field("the digest", f'"{_PLAN.sha256}"', _TAG),
    "Content-Range": Field("which bytes these are", "bytes 1000-4710/4711", r"^bytes [0-9]+-[0-9]+/[0-9]+$"),
    "Upload-Offset": Field("bytes of the report that have arrived", "1000", _NUMBER),
    "Upload-Length": Field("bytes of the whole report", "4711", _NUMBER),
    "Upload-Complete": Field("whether nothing comes after it; in an answer, whether it was counted", "?1", r"^\?[01]$"),
    "Repr-Digest": Field("SHA-256 of the whole report (RFC 9530); signed", _DIGEST, _SHA256),
    PROBLEM_FIELD: Field("the name of the problem's type, for HEAD too", "unknown-device", r"^[a-z-]+$"),
}
"""Header fields by name."""


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
