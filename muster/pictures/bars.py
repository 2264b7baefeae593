"""A picture of an answer: a bar for each group, with what noise may move it by, and a panel for each column."""

from __future__ import annotations

from fedcore.questions.answer import Answer
from fedcore.visible import visible
from muster.pictures.heat_map import picture_of, shade, text_at
from muster.pictures.picture import GREY, Picture

LEFT, TOP, WIDTH, HEIGHT, GAP, LABELS = 60, 40, 560, 180, 60, 24
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
        top = TOP + place * (HEIGHT + GAP)
        parts += _panel(answer, column, names, top)
    return picture_of(LEFT + WIDTH + 20, TOP + max(len(numbers), 1) * (HEIGHT + GAP), parts)


def _is_number(answer: Answer, column: int) -> bool:
    values = [row[column] for row in answer.rows if row[column] is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _panel(answer: Answer, column: int, names: list[str], top: float) -> list[str]:
    values = [float(row[column] or 0) for row in answer.rows]
    low, high = min(0.0, *values), max(0.0, *values)
    scale = HEIGHT / ((high - low) or 1.0)
    base, width = top + high * scale, WIDTH / len(values)
    parts = [text_at(LEFT + WIDTH / 2, top - 12, visible(answer.columns[column]))]
    every = 1 + (len(values) - 1) // LABELS
    for index, value in enumerate(values):
        x = LEFT + index * width
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
            parts.append(text_at(x + width / 2, top + HEIGHT + 18, visible(names[index])))
    parts.append(text_at(LEFT / 2, top + 4, f"{high:.4g}"))
    parts.append(f'<path d="M{LEFT} {base:.2f}h{WIDTH}" stroke="{GREY}"/>')
    return parts
