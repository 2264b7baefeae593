"""Tables as text for documents: Markdown and LaTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "−": "$-$"}
_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def markdown(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of cells in Markdown; a cell may hold a bar."""
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in body)]
    return (
        "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- |", "|---|").replace(" --- |", "---|")
    )


def plain_markdown(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of plain text in Markdown, where no character of a cell is markup."""
    return markdown([_escaped(name) for name in columns], [[_escaped(cell) for cell in row] for row in body])


def latex(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of plain text in LaTeX: a `tabular`, which needs no package."""
    head, *rows = [" & ".join(map(_in_latex, row)) + r" \\" for row in (columns, *body)]
    lines = [rf"\begin{{tabular}}{{{'l' * len(columns)}}}", r"\hline", head, r"\hline", *rows, r"\hline"]
    return "\n".join([*lines, "\\end{tabular}\n"])


def _escaped(cell: str) -> str:
    return re.sub(r"([\\`*_<>\[\]])", r"\\\1", _one_line(cell))


def _in_latex(cell: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in _one_line(cell))


def _one_line(cell: str) -> str:
    return " ".join(cell.split())
