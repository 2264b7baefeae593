"""What commands print with nothing but the standard library: JSON, and tables in columns of spaces."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

# Longer cells go on in the next line.
WIDEST = 60


def emit(value: Any) -> None:
    """Print a value as one line of JSON."""
    say(msgspec.json.encode(value).decode())


def say(line: str) -> None:
    """Print a line, at once: whoever reads it may be another program."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def show_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one pair a line."""
    _show([[[name], _lines(value)] for name, value in fields.items()])


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; a cell may have several lines."""
    _show([[[name, "-" * len(name)] for name in columns], *([_lines(value) for value in row] for row in rows)])


def words(value: object) -> str:
    """A value for people: short floats, lists by commas, mappings as name=value of what is there, nothing as a dash."""
    if isinstance(value, Mapping):
        return ", ".join(f"{words(name)}={words(part)}" for name, part in value.items() if part is not None) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value)) or "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
    return "–" if value is None else str(value)


def _lines(value: object) -> list[str]:
    return [part for line in words(value).splitlines() for part in textwrap.wrap(line, WIDEST) or [""]]


def _show(rows: Sequence[Sequence[Sequence[str]]]) -> None:
    """Print rows of cells of lines, with every column as wide as its longest line."""
    widths = [max(len(line) for row in rows for line in row[column]) for column in range(len(rows[0]) if rows else 0)]
    for row in rows:
        for lines in itertools.zip_longest(*row, fillvalue=""):
            say("  ".join(line.ljust(width) for line, width in zip(lines, widths, strict=True)).rstrip())
