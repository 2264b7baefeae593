"""Settings of an algorithm: dataclass fields that carry their allowed range, and their parsing from text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fedcore.errors import InvalidSetting
from fedcore.validation import offered

MOST = 1 << 20


def positive(default: float) -> Any:
    """A finite number above 0."""
    return _field(default, float, lambda value: 0 < value < float("inf"), "a number above 0")


def fraction(default: float) -> Any:
    """A number from 0 (included) to 1 (excluded)."""
    return _field(default, float, lambda value: 0 <= value < 1, "a number from 0 to below 1")


def count(default: int, least: int = 1) -> Any:
    """A whole number up to 2^20: a batch is padded to its size, so more than any device has must fit in memory."""
    return _field(default, int, lambda value: least <= value <= MOST, f"a whole number from {least} to {MOST}")


def nonnegative(default: float) -> Any:
    """A finite number from 0."""
    return _field(default, float, lambda value: 0 <= value < float("inf"), "a number from 0")


def whole(default: int) -> Any:
    """A whole number from 0 to 2^20."""
    return _field(default, int, lambda value: 0 <= value <= MOST, f"a whole number from 0 to {MOST}")


def flag(default: bool) -> Any:
    """True or false."""
    return _field(default, _truth, lambda value: value in {True, False}, "true or false")


def choice(default: str, *others: str) -> Any:
    """One of the given words; the first is the default."""
    words = (default, *others)
    return _field(default, str, lambda value: value in words, f"one of {', '.join(words)}")


def text(default: str, kind: Callable[[str], str], wording: str) -> Any:
    """Text that `kind` accepts, and may write in another way; for other text it raises ValueError."""
    return _field(default, kind, lambda value: True, wording)


def parse(algorithm: type[Any], given: Mapping[str, object]) -> Any:
    """An algorithm from settings given as text or numbers.

    Raises InvalidSetting, naming the setting and what it may be.
    """
    fields = {field.name: field for field in dataclasses.fields(algorithm)}
    values = {}
    for name, raw in given.items():
        if name not in fields:
            raise InvalidSetting(f"{algorithm.name} has no setting {name!r}; {offered(name, fields)}")
        kind, allowed, wording = fields[name].metadata["setting"]
        try:
            # int(2.5) would drop a half without a word, so numbers take the same road as text.
            values[name] = kind(str(raw))
        except ValueError:
            values[name] = None
        if values[name] is None or not allowed(values[name]):
            hint = f"; give it a value, as {name}={fields[name].default}" if raw is True else ""  # a name alone
            raise InvalidSetting(f"{algorithm.name}: {name} must be {wording}, not {raw!r}{hint}")
    return algorithm(**values)


def _truth(text: str) -> bool:
    """Raises ValueError for other words."""
    return bool(("false", "true").index(text.lower()))


def _field(default: Any, kind: Callable[[str], Any], allowed: Callable[[Any], bool], wording: str) -> Any:
    return dataclasses.field(default=default, metadata={"setting": (kind, allowed, wording)})
