"""Heat maps as SVG pictures: a cell for each pair of settings, shaded by its number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from muster.pictures.picture import FONTS, GREY, Picture

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, BELOW = 64, 34, 110, 44, 50


def draw_heat_map(
    title: str,
    rows: tuple[str, Sequence[str]],
    columns: tuple[str, Sequence[str]],
    values: Sequence[Sequence[float | None]],
) -> Picture:
    """Draw a heat map. rows, columns: the name of a setting, and its values.

    values: by row, then by column, darker where larger; None, left white, where training diverged.
    """
    numbers = [value for row in values for value in row if value is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    width = LEFT + CELL_WIDTH * len(columns[1]) + 20
    height = TOP + CELL_HEIGHT * len(rows[1]) + BELOW
    parts = [text_at(width / 2, 24, title)]
    for at, (label, row) in enumerate(zip(rows[1], values, strict=True)):
        y = TOP + CELL_HEIGHT * at
        parts.append(text_at(LEFT - 24, y + 22, label))
        for column, value in enumerate(row):
            parts += _cell(LEFT + CELL_WIDTH * column, y, value, (low, high))
    bottom = TOP + CELL_HEIGHT * len(rows[1])
    parts += [text_at(LEFT + CELL_WIDTH * (at + 0.5), bottom + 18, label) for at, label in enumerate(columns[1])]
    parts.append(text_at(LEFT + CELL_WIDTH * len(columns[1]) / 2, bottom + 40, columns[0]))
    parts.append(text_upwards(20, TOP + CELL_HEIGHT * len(rows[1]) / 2, rows[0]))
    return picture_of(width, height, parts)


def _cell(x: float, y: float, value: float | None, ends: tuple[float, float]) -> list[str]:
    low, high = ends
    share = 0.0 if value is None or high == low else (value - low) / (high - low)
    fill = "#ffffff" if value is None else shade(share)
    box = f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{fill}" stroke="{GREY}"/>'
    text = "–" if value is None else f"{value:.3g}"
    return [box, text_at(x + CELL_WIDTH / 2, y + 22, text, "#ffffff" if share > 0.55 else "#222222")]


_SHADES = ((0xE8, 0x08), (0xF1, 0x45), (0xFA, 0x94))
"""Red, green and blue, each of the smallest and the largest number."""


def shade(share: float) -> str:
    """The colour of a cell, light for 0 and dark for 1."""
    return "#" + "".join(f"{round(light + share * (dark - light)):02x}" for light, dark in _SHADES)


def text_at(x: float, y: float, text: str, colour: str = GREY, attributes: str = "") -> str:
    """Text centred at x."""
    return f'<text x="{x}" y="{y}" text-anchor="middle" fill="{colour}"{attributes}>{escape(text)}</text>'


def text_upwards(x: float, y: float, text: str) -> str:
    """Text that reads upwards, centred at y."""
    return text_at(x, y, text, attributes=f' transform="rotate(-90 {x} {y})"')


def picture_of(width: float, height: float, parts: Iterable[str]) -> Picture:
    """A picture of SVG elements."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONTS}" font-size="13">'
    )
    return Picture("\n".join([head, *parts, "</svg>\n"]))
