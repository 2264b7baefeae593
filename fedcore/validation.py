"""Types with bounds, and classes whose values are checked however they were made, not only when they were decoded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

from fedcore.decoding import converter

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]

T = TypeVar("T")
_FIELDS: dict[type, tuple[tuple[str, Callable[[object], Any]], ...]] = {}


def checked(kind: type[T]) -> type[T]:
    """Decorate a struct or a dataclass whose fields `misfit` is to check."""
    types = get_type_hints(kind, include_extras=True)
    _FIELDS[kind] = tuple((name, converter(types[name])) for name in inspect.signature(kind).parameters)
    return kind


def misfit(values: object) -> tuple[str, Any, str] | None:
    """The first field whose value is not of its declared type: name, value and msgspec's words; None when all are."""
    for name, convert in _FIELDS[type(values)]:
        value = getattr(values, name)
        try:
            convert(value)
        except msgspec.ValidationError as error:
            return name, value, str(error)
    return None
