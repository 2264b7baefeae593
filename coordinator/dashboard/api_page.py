"""Values of the page of the admin API: its document by noun, with a line of curl for each operation. No HTML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from coordinator.api.openapi import BYTES
from coordinator.operations import PREFIX

_ADMIN = "admin"
_CURL = 'curl -H "Authorization: Bearer $TOKEN"'


class Operation(NamedTuple):
    """An operation as the page shows it. refusals: its own errors, without those that most operations have."""

    title: str
    about: str
    curl: str
    parameters: list[dict[str, Any]]
    bodies: dict[str, Any]
    answers: dict[str, Any]
    refusals: dict[str, str]


def api_page(document: Mapping[str, Any]) -> dict[str, Any]:
    """Operations by noun, the errors that at least half of all have, and messages by name."""
    every = [(path, method, one) for path, methods in document["paths"].items() for method, one in methods.items()]
    counted = Counter(refusal for _, _, one in every for refusal in _refusals(one).items())
    common = {refusal for refusal, count in counted.items() if 2 * count >= len(every)}
    nouns: dict[str, list[Operation]] = {}
    for path, method, one in every:
        operation = Operation(
            title=f"{method.upper()} {path}",
            about=one.get("description") or one.get("summary", ""),
            curl=_curl(path, method, one),
            parameters=one.get("parameters", []),
            bodies=one.get("requestBody", {}).get("content", {}),
            answers={status: answer for status, answer in one["responses"].items() if status < "400"},
            refusals=dict(_refusals(one).items() - common),
        )
        nouns.setdefault(_noun(path, one), []).append(operation)
    messages = document["components"]["schemas"]
    return {"title": document["info"]["title"], "nouns": nouns, "common": sorted(common), "messages": messages}


def names_of(schema: Any) -> list[str]:
    """The names of the messages that a part of the document refers to, in order."""
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
        return own + [name for inner in schema.values() for name in names_of(inner)]
    return [name for inner in schema for name in names_of(inner)] if isinstance(schema, list) else []


def _refusals(one: Mapping[str, Any]) -> dict[str, str]:
    return {status: answer["description"] for status, answer in one["responses"].items() if status >= "400"}


def _noun(path: str, one: Mapping[str, Any]) -> str:
    """The kind of thing that an operation is about: the last that its path names one of, or else the first word."""
    if one["tags"] != [_ADMIN]:
        return str(one["tags"][0])
    named = re.findall(r"(\w+)/{", path)
    return str(named[-1]) if named else path.removeprefix(f"{PREFIX}/")


def _curl(path: str, method: str, one: Mapping[str, Any]) -> str:
    """What asks for it in a shell, where TOKEN, MUSTER and what the path names are variables."""
    parts = [_CURL if "401" in one["responses"] else "curl"]
    bodies = list(one.get("requestBody", {}).get("content", {}))
    if method != "get":
        parts.append({"head": "--head"}.get(method, f"-X {method.upper()}"))
    if bodies:
        parts.append(f"-H 'Content-Type: {bodies[0]}' --data-binary @FILE")
    if any(BYTES in answer.get("content", {}) for answer in one["responses"].values()):
        parts.append("--output FILE")
    asked = [each["name"] for each in one.get("parameters", []) if each["in"] == "query" and each.get("required")]
    query = "&".join(f"{name}=${name.upper()}" for name in asked)
    filled = re.sub(r"{(\w+)}", lambda found: f"${{{found[1].upper()}}}", path)
    return " ".join([*parts, f'"$MUSTER{filled}{"?" if query else ""}{query}"'])
