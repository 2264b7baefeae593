"""Structs whose values are checked however they were made, not only when they were decoded."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec


def misfit(values: msgspec.Struct) -> tuple[str, Any, str] | None:
    """The first field whose value is not of its declared type: name, value and msgspec's words; None when all are."""
    for name, declared in _declared(type(values)):
        value = getattr(values, name)
        try:
            msgspec.convert(value, declared)
        except msgspec.ValidationError as error:
            return name, value, str(error)
    return None


@cache
def _declared(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    # Evaluating annotations costs a millisecond, and conditions are read many times in a session.
    return tuple((field.name, field.type) for field in msgspec.structs.fields(kind))
