"""Heat maps, bars of an answer and users' labels as SVG pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from fedcore.errors import visible
from fedcore.questions.answer import Answer
from muster.pictures.curves import FONTS, GREY, Picture

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


BARS_LEFT, BARS_TOP, BARS_WIDTH, BARS_HEIGHT, BARS_GAP, LABELS = 60, 40, 560, 180, 60, 24
"""The sizes of a panel, and the most groups that are named below it."""


def draw_answer(answer: Answer) -> Picture:
    """Draw the columns of numbers of an answer over its groups, which the other columns name."""
    numbers = [column for column in range(len(answer.columns)) if _is_number(answer, column)]
    keys = [column for column in range(len(answer.columns)) if column not in numbers]
    if not keys and len(numbers) > 1 and len(answer.rows) > 1:
        keys, numbers = numbers[:1], numbers[1:]  # whole keys are numbers too
    names = [", ".join(str(row[key]) for key in keys) for row in answer.rows]
    parts: list[str] = []
    for place, column in enumerate(numbers):
        top = BARS_TOP + place * (BARS_HEIGHT + BARS_GAP)
        parts += _panel(answer, column, names, top)
    return picture_of(BARS_LEFT + BARS_WIDTH + 20, BARS_TOP + max(len(numbers), 1) * (BARS_HEIGHT + BARS_GAP), parts)


def _is_number(answer: Answer, column: int) -> bool:
    values = [row[column] for row in answer.rows if row[column] is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _panel(answer: Answer, column: int, names: list[str], top: float) -> list[str]:
    values = [float(row[column] or 0) for row in answer.rows]
    low, high = min(0.0, *values), max(0.0, *values)
    scale = BARS_HEIGHT / ((high - low) or 1.0)
    base, width = top + high * scale, BARS_WIDTH / len(values)
    parts = [text_at(BARS_LEFT + BARS_WIDTH / 2, top - 12, visible(answer.columns[column]))]
    every = 1 + (len(values) - 1) // LABELS
    for index, value in enumerate(values):
        x = BARS_LEFT + index * width
        y, height = (base - value * scale, value * scale) if value >= 0 else (base, -value * scale)
        parts.append(
            f'<rect x="{x + 0.1 * width:.2f}" y="{y:.2f}" width="{0.8 * width:.2f}" height="{height:.2f}" '
            f'fill="{shade(0.7)}"><title>{visible(names[index])}: {value:g}</title></rect>'
        )
        error = None if answer.errors is None else answer.errors[index][column]
        if error is not None:
            middle, reach = x + width / 2, error * scale
            parts.append(
                f'<path d="M{middle:.2f} {base - value * scale - reach:.2f}v{2 * reach:.2f}" stroke="{GREY}"/>'
            )
        if names[index] and index % every == 0:
            parts.append(text_at(x + width / 2, top + BARS_HEIGHT + 18, visible(names[index])))
    parts.append(text_at(BARS_LEFT / 2, top + 4, f"{high:.4g}"))
    parts.append(f'<path d="M{BARS_LEFT} {base:.2f}h{BARS_WIDTH}" stroke="{GREY}"/>')
    return parts


MIX_LEFT, MIX_TOP, MIX_WIDTH, MIX_HEIGHT, MIX_GAP, TOTALS, MIX_BELOW = 40, 44, 560, 400, 20, 100, 50
ROWS = 200
"""The most users drawn, evenly spaced; more rows would be too thin to see."""


def draw_label_mix(counts: NDArray[np.int64], title: str) -> Picture:
    """Draw the shares of labels. counts: of each class at each user (users, classes).

    Users with the same largest class stand together.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    order = np.lexsort((-shares.max(1), shares.argmax(1)))
    order = order[np.linspace(0, len(order) - 1, min(len(order), ROWS)).astype(int)]
    height, width = MIX_HEIGHT / len(order), MIX_WIDTH / counts.shape[1]
    totals = counts[order].sum(1)
    parts = [_box(MIX_LEFT, MIX_TOP, MIX_WIDTH, MIX_HEIGHT, shade(0.0))]
    for at, user in enumerate(order):
        y = MIX_TOP + height * at
        parts += [
            _box(MIX_LEFT + width * label, y, width, height, shade(float(share)))
            for label, share in enumerate(shares[user])
            if share
        ]
        parts.append(
            _box(MIX_LEFT + MIX_WIDTH + MIX_GAP, y, TOTALS * int(totals[at]) / max(int(totals.max()), 1), height, GREY)
        )
    bottom = MIX_TOP + MIX_HEIGHT
    parts += [
        text_at(MIX_LEFT + width * (label + 0.5), bottom + 18, str(label))
        for label in range(0, counts.shape[1], 1 + counts.shape[1] // 24)
    ]
    parts += [
        text_at(MIX_LEFT + MIX_WIDTH / 2, 24, f"{title}: share of each user's labels"),
        text_at(MIX_LEFT + MIX_WIDTH / 2, bottom + 40, "class"),
        text_upwards(24, MIX_TOP + MIX_HEIGHT / 2, "user, by largest class"),
        text_at(MIX_LEFT + MIX_WIDTH + MIX_GAP + TOTALS / 2, bottom + 18, f"labels, to {totals.max():,}"),
    ]
    return picture_of(MIX_LEFT + MIX_WIDTH + MIX_GAP + TOTALS + MIX_GAP, bottom + MIX_BELOW, parts)


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"/>'
