"""Small pictures as lines of characters, with two rows of the picture in a line."""

from __future__ import annotations

from collections.abc import Sequence

_CELLS = " ▀▄█"
_INK = 0.4
"""The level from which a cell is inked: a digit of 8 × 8 cells is then easiest to read."""


def drawn_in_characters(levels: Sequence[Sequence[float]]) -> list[str]:
    """The lines of a picture with 2n rows of m levels, 0 to 1: n lines of m characters."""
    inked = [[level > _INK for level in row] for row in levels]
    halves = zip(inked[::2], inked[1::2], strict=True)
    return ["".join(_CELLS[up + 2 * down] for up, down in zip(*rows, strict=True)) for rows in halves]
