"""Options in parts: KEY=VALUE with commas between, repeatable; a KEY alone is a switch."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def parse_key_values(texts: Sequence[str] | None, option: str = "--set") -> dict[str, object]:
    """The parts as a mapping; True is the value of a key alone. Raises typer.BadParameter on what has no key."""
    values: dict[str, object] = {}
    for part in (part.strip() for text in texts or () for part in text.split(",")):
        key, equals, value = part.partition("=")
        if not key:
            raise typer.BadParameter(f"{part!r} is not of the form key=value", param_hint=option)
        values[key] = value if equals else True
    return values
