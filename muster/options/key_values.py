"""Options in parts, KEY=VALUE, each of which may be repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import typer

from fedcore.names import offered

T = TypeVar("T")


def parse_settings(pairs: Sequence[str] | None, option: str = "--set") -> dict[str, object]:
    """The parts as a mapping. Raises typer.BadParameter on anything else."""
    settings: dict[str, object] = {}
    for pair in pairs or ():
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"{pair!r} is not of the form key=value", param_hint=option)
        settings[key] = value
    return settings


def parse_key_values(
    option: str, pairs: Sequence[str] | None, fields: Sequence[str], made: Callable[[dict[str, object]], T]
) -> T:
    """What is made of the parts of an option, whose keys are among `fields`.

    Raises typer.BadParameter naming the part that is unknown, or that `made` refused by a ValidationError.
    """
    values = parse_settings(pairs, option)
    for name in values:
        if name not in fields:
            raise typer.BadParameter(f"there is no {name!r}; {offered(name, fields)}", param_hint=option)
    try:
        return made(values)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
