"""The page of the admin API: which messages a part of its OpenAPI document refers to."""

from __future__ import annotations

from typing import Any


def names_of(schema: Any) -> list[str]:
    """The names of the messages that a schema refers to, in the order in which it does."""
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
        return own + [name for inner in schema.values() for name in names_of(inner)]
    return [name for inner in schema for name in names_of(inner)] if isinstance(schema, list) else []
