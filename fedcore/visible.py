"""Untrusted text made visible, in lines and in tables of a notebook: nothing in it hides or reverses the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

# Python calls these printable, and they have no width or no ink: Unicode's Default_Ignorable_Code_Point, and a blank.
_INKLESS = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def visible(text: str) -> str:
    """A text as one line that is safe to show: all but letters, marks, numbers, signs and plain spaces is escaped.

    Escaped are controls with line breaks, overrides of direction, and characters without width. They become `\\u001b`
    and the like, as in JSON, so a JSON document stays the same document.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character.isprintable() and not _INKLESS.match(character) else _escaped(character)
        for character in text
    )


def visible_lines(text: str) -> str:
    """As `visible`, for a text of several lines, such as a traceback."""
    return "\n".join(map(visible, text.split("\n")))


def _escaped(letter: str) -> str:
    return re.sub("....", r"\\u\g<0>", letter.encode("utf-16-be", "surrogatepass").hex())


def table_of(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in HTML."""
    head = "".join(f"<th>{_cell(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts_of(title: str, facts: Mapping[str, object]) -> str:
    """Named values as a table in HTML, without those that are None or empty."""
    return table_of([title, ""], [(name, value) for name, value in facts.items() if value not in (None, "", {}, [])])


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{name}={inner}" for name, inner in value.items())
    elif isinstance(value, float):
        value = f"{value:.4g}"
    elif isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    return escape(visible("" if value is None else str(value)))
