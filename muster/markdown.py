"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; a cell may hold a bar."""
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in body)]
    return (
        "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- |", "|---|").replace(" --- |", "---|")
    )
