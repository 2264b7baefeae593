"""Heat maps as SVG pictures: a cell for each pair of settings, shaded by its number."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, BELOW = 64, 34, 110, 44, 50
TEXT = 'font-family="system-ui, sans-serif" font-size="13"'
NAME = "#888"
"""The colour of names: of middling brightness, legible on white and on black."""


def draw_heat_map(
    title: str,
    rows: tuple[str, Sequence[str]],
    columns: tuple[str, Sequence[str]],
    values: Sequence[Sequence[float | None]],
) -> str:
    """The SVG text of a heat map. rows, columns: the name of the setting, and its values.

    values: by row, then by column, darker where larger; None where training diverged, which is left white.
    """
    known = [value for row in values for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    width = LEFT + CELL_WIDTH * len(columns[1]) + 20
    height = TOP + CELL_HEIGHT * len(rows[1]) + BELOW
    parts = [_text(width / 2, 24, title, NAME)]
    for at, (label, row) in enumerate(zip(rows[1], values, strict=True)):
        y = TOP + CELL_HEIGHT * at
        parts.append(_text(LEFT - 24, y + 22, label, NAME))
        for column, value in enumerate(row):
            parts += _cell(LEFT + CELL_WIDTH * column, y, value, (low, high))
    bottom = TOP + CELL_HEIGHT * len(rows[1])
    parts += [_text(LEFT + CELL_WIDTH * (at + 0.5), bottom + 18, label, NAME) for at, label in enumerate(columns[1])]
    parts.append(_text(LEFT + CELL_WIDTH * len(columns[1]) / 2, bottom + 40, columns[0], NAME))
    middle = TOP + CELL_HEIGHT * len(rows[1]) / 2
    parts.append(_text(20, middle, rows[0], NAME, f' transform="rotate(-90 20 {middle})"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _cell(x: float, y: float, value: float | None, ends: tuple[float, float]) -> list[str]:
    low, high = ends
    share = 0.0 if value is None or high == low else (value - low) / (high - low)
    fill = "#ffffff" if value is None else "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in _SHADES)
    box = f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{fill}" stroke="{NAME}"/>'
    words = "–" if value is None else f"{value:.3g}"
    return [box, _text(x + CELL_WIDTH / 2, y + 22, words, "#ffffff" if share > 0.55 else "#222222")]


_SHADES = ((0xE8, 0x08), (0xF1, 0x45), (0xFA, 0x94))
"""Red, green and blue of the smallest and of the largest number."""


def _text(x: float, y: float, words: str, colour: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle" fill="{colour}" {TEXT}{more}>{escape(words)}</text>'
