"""Types with bounds, and structs whose values are checked however they were made, not only when they were decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from fedcore.decoding import converter

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]

S = TypeVar("S", bound=msgspec.Struct)
_FIELDS: dict[type[msgspec.Struct], tuple[tuple[str, Callable[[object], Any]], ...]] = {}


def checked(kind: type[S]) -> type[S]:
    """Decorate a struct whose fields `misfit` is to check."""
    _FIELDS[kind] = tuple((field.name, converter(field.type)) for field in msgspec.structs.fields(kind))
    return kind


def misfit(values: msgspec.Struct) -> tuple[str, Any, str] | None:
    """The first field whose value is not of its declared type: name, value and msgspec's words; None when all are."""
    for name, convert in _FIELDS[type(values)]:
        value = getattr(values, name)
        try:
            convert(value)
        except msgspec.ValidationError as error:
            return name, value, str(error)
    return None
