"""Tables as notebooks show them. Names may be strangers', so everything in a table is made visible and escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from fedcore.visible import visible


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
