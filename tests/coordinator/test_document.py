"""The OpenAPI document against the specification: every route, problem and message, and nothing that is not there."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from coordinator.api.openapi import EXAMPLES, FIELDS
from fedcore.wire import messages
from fedcore.wire.messages import PROBLEM_TYPE, PROBLEMS, Problem

SPEC = (Path(__file__).parents[2] / "docs" / "spec" / "wire.md").read_text()
HEALTH = {"/healthz", "/readyz"}
NOWHERE = {"unknown-resource", "method-not-allowed", "beacon-refused"}
"""Problems of addresses that there are not, and of the enrolment authority."""


@pytest.fixture
def document(client):
    return client.get("/openapi.json").json()


def operations(document):
    found = document["paths"].items()
    return {(method.upper(), path): one for path, methods in found for method, one in methods.items()}


def bodies(document):
    """Every body that a request or an answer may have, by media type."""
    for one in operations(document).values():
        for part in (one.get("requestBody"), *one["responses"].values()):
            yield from (part or {}).get("content", {}).items()


def test_the_document_has_the_routes_of_the_specification_and_no_others(document):
    calls = re.findall(r"^\| `([A-Z]+) (/v1/\S+)` \|", SPEC, re.MULTILINE)
    assert len(calls) == 14
    assert operations(document).keys() == {*calls, *(("GET", path) for path in HEALTH)}


def test_every_problem_is_an_answer_of_some_route_and_has_an_example(document):
    examples = [content["examples"] for media, content in bodies(document) if media == PROBLEM_TYPE]
    found = {slug: value["value"] for example in examples for slug, value in example.items()}
    assert found.keys() | NOWHERE == PROBLEMS.keys()
    for slug, value in found.items():
        assert msgspec.convert(value, Problem).slug == slug
        assert value["status"] == PROBLEMS[slug].status


def test_every_problem_stands_under_its_status(document):
    for one in operations(document).values():
        for status, answer in one["responses"].items():
            for slug in answer.get("content", {}).get(PROBLEM_TYPE, {}).get("examples", ()):
                assert PROBLEMS[slug].status == int(status)


def test_every_route_but_health_is_signed(document):
    assert document["components"]["securitySchemes"].keys() == {"device"}
    for (_, path), one in operations(document).items():
        assert one.get("security") == (None if path in HEALTH else [{"device": []}])
        assert path in HEALTH or "unsigned" in one["responses"]["401"]["description"]


def test_every_message_has_a_schema_and_an_example_that_is_one(document):
    json_bodies = [content for media, content in bodies(document) if media == "application/json"]
    named = {name: value["value"] for content in json_bodies for name, value in content.get("examples", {}).items()}
    assert named.keys() == {kind.__name__ for kind in EXAMPLES}
    for kind, example in EXAMPLES.items():
        assert messages.decode(json.dumps(named[kind.__name__]).encode(), kind) == example


def test_every_reference_leads_somewhere(document):
    found = {one.split('"')[0] for one in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert found <= document["components"]["schemas"].keys()


def test_every_header_field_that_is_documented_is_one_of_a_route(document):
    fields = set()
    for one in operations(document).values():
        fields |= {parameter["name"] for parameter in one.get("parameters", ()) if parameter["in"] == "header"}
        fields |= {name for answer in one["responses"].values() for name in answer.get("headers", ())}
    assert fields == FIELDS.keys()


def test_every_body_of_a_device_s_route_is_described(document):
    """A route answers with problem documents, and with none of the framework's own."""
    for (_, path), one in operations(document).items():
        for status, answer in one["responses"].items():
            for media, content in answer.get("content", {}).items():
                assert media == PROBLEM_TYPE or int(status) < 300
                assert path in HEALTH or content["schema"], (path, status, media)
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()
