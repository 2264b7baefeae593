"""Rules on devices as words of a command line: `charging,min_battery=0.4`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import typer

Rules = TypeVar("Rules")


def parse_rules(texts: Sequence[str] | None, kind: type[Rules], option: str) -> Rules:
    """The rules of all `texts` together, as a `kind`. Raises typer.BadParameter naming the one that is none."""
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # any of them has fields
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
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
