"""Output of commands that needs only the standard library and msgspec, and the commands' exit codes.

Every line of a command passes through here, so that text of strangers in it is made visible.
"""

from __future__ import annotations

import itertools
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

import msgspec

from fedcore.errors import visible

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
OURS = {"authority", "coordinator", "device_runtime", "export", "fedcore", "ingress", "muster", "secagg", "simulator"}
"""Packages whose errors are words for people."""

_GAP = "  "
# A longer word in a cell may be broken: it is a path as a rule.
_WORD = 40


def emit(value: Any) -> None:
    """Print a value as one line of JSON."""
    say(msgspec.json.encode(value).decode())


def say(line: str = "") -> None:
    """Print a line and flush it: the reader may be another program."""
    _write(line, sys.stdout)


def remark(line: str) -> None:
    """Print a line on standard error: an error, or what is not the answer."""
    _write(line, sys.stderr)


def rewrite(line: str, end: str = "") -> None:
    """Show a line on standard error in place of the one that stands there."""
    sys.stderr.write(f"\r\x1b[K{visible(line)}{end}")
    sys.stderr.flush()


class Lines(tuple[str, ...]):
    """A cell of several lines."""

    __slots__ = ()


def answer(facts: Mapping[str, object], json: bool) -> None:
    """Print named values: as one JSON object, or for people one a line."""
    if json:
        emit(facts)
    else:
        show_fields(facts)


def show_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one pair a line; on a terminal long values go on in the next line, at spaces only."""
    rows = [(words(name), words(value)) for name, value in fields.items()]
    _show(rows, _narrowed(rows, _WORD), whole_words=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. Nothing is ever cut; a cell may have several lines.

    In a pipe columns are as wide as they need. On a terminal cells go on in the next line, at spaces or within a word
    of over 40 characters, and a table that does not fit even so is printed row by row, one field a line.
    """
    columns = [words(name) for name in columns]
    cells = [[words(value) for value in row] for row in rows]
    widths = _narrowed([columns, *cells], _WORD)
    if _total(widths) <= _room():
        rule = ["-" * min(len(name), width) for name, width in zip(columns, widths, strict=True)]
        _show([columns, rule, *cells], widths)
        return
    for row in cells:
        show_fields(dict(zip(columns, row, strict=True)))
        say()


def words(value: object) -> str:
    """A value for people: short floats, lists by commas, mappings as name=value without None, nothing as a dash."""
    if isinstance(value, Lines):
        return "\n".join(map(words, value)) or "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{words(name)}={words(part)}" for name, part in value.items() if part is not None) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value)) or "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value in (None, "") else visible(str(value))


def _room() -> float:
    """The width of a line in characters: without a limit in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _narrowed(rows: Sequence[Sequence[str]], longest_word: float = math.inf) -> list[int]:
    """Widths of columns: as wide as their lines, the widest narrowed until all fit, none below its longest word.

    Words over `longest_word` characters count as many.
    """
    widths = _longest(rows, str.splitlines)
    least = [min(width, longest_word) for width in _longest(rows, str.split)]
    while _total(widths) > _room():
        loose = [column for column, width in enumerate(widths) if width > least[column]]
        if not loose:
            break
        widths[max(loose, key=widths.__getitem__)] -= 1
    return widths


def _longest(rows: Sequence[Sequence[str]], parts: Callable[[str], list[str]]) -> list[int]:
    """The length of the longest part in each column."""
    columns = zip(*rows, strict=True)
    return [max((len(part) for cell in column for part in parts(cell)), default=0) for column in columns]


def _wrapped(cell: str, width: int, whole_words: bool) -> list[str]:
    wrap = textwrap.TextWrapper(max(width, 1), break_on_hyphens=False, break_long_words=not whole_words).wrap
    return [part for line in cell.splitlines() for part in wrap(line) or [""]]


def _show(rows: Sequence[Sequence[str]], widths: Sequence[int], *, whole_words: bool = False) -> None:
    for row in rows:
        cells = [_wrapped(cell, width, whole_words) for cell, width in zip(row, widths, strict=True)]
        for lines in itertools.zip_longest(*cells, fillvalue=""):
            say(_GAP.join(line.ljust(width) for line, width in zip(lines, widths, strict=True)).rstrip())


def _write(line: str, stream: TextIO) -> None:
    stream.write(f"{visible(line)}\n")
    stream.flush()
