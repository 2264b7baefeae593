"""Types with bounds, and classes whose values are checked however they were made, not only when they were decoded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
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
    """Decorate a struct or a dataclass whose fields `type_error` is to check."""
    types = get_type_hints(kind, include_extras=True)
    names = inspect.signature(kind).parameters
    _FIELDS[kind] = tuple((name, types[name], converter(types[name])) for name in names)
    return kind


def type_error(values: object) -> tuple[str, Any, str] | None:
    """The first field whose value is not of its declared type: name, value and what is wrong; None when all are."""
    for name, kind, convert in _FIELDS[type(values)]:
        value = getattr(values, name)
        try:
            convert(value)
        except msgspec.ValidationError as error:
            return name, value, explained(error, value, kind)
    return None


def explained(error: msgspec.ValidationError, value: object, kind: object) -> str:
    """What is wrong with a value that is not of a kind: the choices or fields there are, or msgspec's words."""
    if get_origin(kind) is Literal:
        return offered(value, get_args(kind))
    for one in get_args(kind) or (kind,):
        if _names(one) and not isinstance(value, Mapping):
            return f"expected {one.__name__}(…), or a mapping with some of {', '.join(_names(one))}"
    return str(error)


def field_converter(kind: type, dec_hook: Callable[[type, Any], Any] | None = None) -> Callable[[str, object], Any]:
    """A function from the name of a field of a dataclass and a plain value, such as a file has, to the field's value.

    It raises msgspec.ValidationError, naming the field, for a value of a wrong type, and for names in it that are none.
    """
    kinds = get_type_hints(kind)
    converters = {name: converter(one, dec_hook=dec_hook) for name, one in kinds.items()}

    def convert(name: str, value: object) -> Any:
        try:
            made = converters[name](value)
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(
                f"{name} cannot be {value!r}: {explained(error, value, kinds[name])}"
            ) from error
        unknown = misnamed(value, made)
        if unknown is not None:
            raise msgspec.ValidationError(f"{name} cannot be {value!r}: {unknown}")
        return made

    return convert


def misnamed(value: object, made: object) -> str | None:
    """What is wrong with the first name in a plain value that a dataclass made of it does not have; None without one.

    msgspec leaves such names out in silence, as a struct can forbid, and a dataclass cannot.
    """
    if not isinstance(value, Mapping) or not is_dataclass(made):
        return None
    known = _names(type(made))
    for name, part in value.items():
        if name not in known:
            return f"there is no {name!r}; {offered(name, known)}"
        if (found := misnamed(part, getattr(made, name))) is not None:
            return found
    return None


def _names(kind: Any) -> tuple[str, ...]:
    """The names of the fields of a dataclass or a struct; none of other types."""
    return tuple(getattr(kind, "__dataclass_fields__", ())) or getattr(kind, "__struct_fields__", ())
