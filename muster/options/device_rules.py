"""Rules on devices as words of a command line: `charging,min_battery=0.4`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import typer
from msgspec import structs

from coordinator.rules.eligibility import OnDevice, Requires
from fedcore.decoding import converter

Rules = TypeVar("Rules", OnDevice, Requires)
_CONVERTERS: dict[type, Callable[[object], Any]] = {
    kind: converter(kind, strict=False) for kind in (Requires, OnDevice)
}


def parse_rules(texts: Sequence[str] | None, kind: type[Rules], option: str) -> Rules:
    """The rules of all `texts` together, as a `kind`. Raises typer.BadParameter naming the one that is none."""
    known = {field.name: field for field in structs.fields(kind)}
    given: dict[str, object] = {}
    for rule in (rule.strip() for text in texts or () for rule in text.split(",")):
        name, _, value = rule.partition("=")
        if name not in known:
            raise typer.BadParameter(f"{rule!r} is no rule; there are {', '.join(known)}", param_hint=option)
        if (value == "") is not (known[name].default is False):
            how = "takes no value" if value else f"needs a value: {name}=…"
            raise typer.BadParameter(f"{name} {how}", param_hint=option)
        given[name] = value or True
    try:
        rules: Rules = _CONVERTERS[kind](given)
        return rules
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
