"""Types with bounds, and classes whose values are checked however they were made, not only when they were decoded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from fedcore.decoding import converter
from fedcore.names import offered

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]

T = TypeVar("T")
_FIELDS: dict[type, tuple[tuple[str, Any, Callable[[object], Any]], ...]] = {}


def checked(kind: type[T]) -> type[T]:
    """Decorate a struct or a dataclass whose fields `misfit` is to check."""
    types = get_type_hints(kind, include_extras=True)
    names = inspect.signature(kind).parameters
    _FIELDS[kind] = tuple((name, types[name], converter(types[name])) for name in names)
    return kind


def misfit(values: object) -> tuple[str, Any, str] | None:
    """The first field whose value is not of its declared type: name, value and what is wrong; None when all are."""
    for name, kind, convert in _FIELDS[type(values)]:
        value = getattr(values, name)
        try:
            convert(value)
        except msgspec.ValidationError as error:
            return name, value, explained(error, value, kind)
    return None


def explained(error: msgspec.ValidationError, value: object, kind: object) -> str:
    """What is wrong with a value that is not of a kind: the choices there are, or msgspec's words."""
    return offered(value, get_args(kind)) if get_origin(kind) is Literal else str(error)
