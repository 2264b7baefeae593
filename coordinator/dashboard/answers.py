"""Pictures of an answer: bars over one key, lines over ordered bins, a grid over two keys. Numbers of an inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from coordinator.dashboard.curves import Chart, Scale, Tick, chart
from coordinator.rules.questions import TaskAnswer

LEFT, RIGHT, TOP, BOTTOM = Chart.left, Chart.right, Chart.top, Chart.bottom
"""The edges of what is drawn in, those of curves."""
_MOST_PICTURES = 4
_MOST_BARS = 24
"""More groups of numbers are drawn as a line."""
_MOST_IN_GRID = 40
"""Rows or columns of a grid that can be told apart."""
_LABELS = 8
"""Labels beside an axis that have room."""
_LETTER = 7.0
"""The width of a letter."""
_LETTERS_BESIDE = 6
"""The letters of a name on the left of a picture."""
_LARGEST = 1e100
"""Numbers of which differences are finite."""
_ROOM = 0.8
"""The share of its place that a bar takes."""


class Mark(NamedTuple):
    """A bar or a cell: its place and size, how dark it is from 0 to 1, where its error ends, and what it stands for."""

    x: float
    y: float
    width: float
    height: float
    shade: float
    error: tuple[float, float] | None
    words: str


class Bars(NamedTuple):
    """Bars over the groups of one key, or the cells of a grid over those of two. zero: where bars begin."""

    name: str
    kind: str
    horizontal: str
    vertical: str
    marks: tuple[Mark, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    zero: float
    left: float = LEFT
    right: float = RIGHT
    bottom: float = BOTTOM


class Labels(NamedTuple):
    """The columns that name the groups, by their places: one for each key; and all that only name something."""

    keys: tuple[int, ...]
    names: frozenset[int]


Picture: TypeAlias = Chart | Bars
Column: TypeAlias = Sequence[float | None]


def pictures(answer: TaskAnswer, labels: Labels) -> list[Picture]:
    """Pictures of the first columns with sums that are numbers, over one key or two."""
    keys = labels.keys
    if not answer.rows or not 1 <= len(keys) <= 2:
        return []
    drawn: list[Picture] = []
    for place in (place for place in range(len(answer.columns)) if place not in labels.names):
        values = [_number(row[place]) for row in answer.rows]
        errors = [row[place] for row in answer.errors] if answer.errors else [None] * len(values)
        if any(value is not None for value in values) and len(drawn) < _MOST_PICTURES:
            one = _over_one(answer, keys[0], place, values, errors) if len(keys) == 1 else None
            picture = one or (_grid(answer, keys, place, values) if len(keys) == 2 else None)
            drawn += [] if picture is None else [picture]
    return drawn


def _over_one(answer: TaskAnswer, key: int, place: int, values: Column, errors: Column) -> Picture | None:
    name, horizontal = answer.columns[place], answer.columns[key]
    groups = [row[key] for row in answer.rows]
    numbers = [_number(group) for group in groups]
    if len(groups) > _MOST_BARS:
        pairs = zip(numbers, values, strict=True)
        points = sorted((at, value) for at, value in pairs if at is not None and value is not None)
        whole = all(at == round(at) for at, _ in points)
        return chart(name, {name: points}, horizontal=horizontal, whole=whole) if points else None
    scale = _scale(values, errors)
    step = (RIGHT - LEFT) / len(groups)
    zero, marks = scale.place(0.0), []
    for index, (value, error) in enumerate(zip(values, errors, strict=True)):
        if value is None:
            continue
        at, x = scale.place(value), LEFT + step * (index + (1 - _ROOM) / 2)
        whisker = None
        if error is not None:
            whisker = (scale.place(max(value - error, scale.low)), scale.place(min(value + error, scale.high)))
        words = f"{horizontal} {groups[index]}: {value:.6g}" + ("" if error is None else f" ± {error:.3g}")
        marks.append(Mark(x, min(at, zero), step * _ROOM, abs(at - zero), 1.0, whisker, words))
    across = _labels(groups, LEFT, step, _letters(len(groups)))
    return Bars(name, "bars", horizontal, "", tuple(marks), across, scale.ticks(), zero)


def _scale(values: Column, errors: Column) -> Scale:
    """From numbers to heights, with 0 among them. Of errors that are larger than all values the ends are cut off."""
    known = [(value, error or 0.0) for value, error in zip(values, errors, strict=True) if value is not None]
    low, high = min(0.0, *(value for value, _ in known)), max(0.0, *(value for value, _ in known))
    room = (high - low) / 2 or 1.0
    low = max(min(0.0, *(value - error for value, error in known)), low - room)
    high = min(max(0.0, *(value + error for value, error in known)), high + room)
    return Scale(low, high, BOTTOM, TOP)


def _grid(answer: TaskAnswer, keys: Sequence[int], place: int, values: Column) -> Bars | None:
    down, across = (list(dict.fromkeys(row[key] for row in answer.rows)) for key in keys)
    if max(len(down), len(across)) > _MOST_IN_GRID:
        return None
    known = [value for value in values if value is not None]
    low, high = min(0.0, *known), max(known)
    width, height = (RIGHT - LEFT) / len(across), (BOTTOM - TOP) / len(down)
    marks = []
    for row, value in zip(answer.rows, values, strict=True):
        if value is None:
            continue
        x, y = LEFT + width * across.index(row[keys[1]]), TOP + height * down.index(row[keys[0]])
        shade = 1.0 if high <= low else (value - low) / (high - low)
        words = ", ".join(f"{answer.columns[key]} {row[key]}" for key in keys)
        marks.append(Mark(x, y, width, height, shade, None, f"{words}: {value:.6g}"))
    vertical, horizontal = (answer.columns[key] for key in keys)
    names = _labels(across, LEFT, width, _letters(len(across))), _labels(down, TOP, height, _LETTERS_BESIDE)
    return Bars(answer.columns[place], "grid", horizontal, vertical, tuple(marks), *names, BOTTOM)


def _labels(groups: Sequence[object], start: float, step: float, room: int) -> tuple[Tick, ...]:
    """The names of groups, at the middle of their places; of many, some. room: the letters that a name may have."""
    stride = math.ceil(len(groups) / _LABELS)
    return tuple(
        Tick(start + step * (index + 0.5), _short(group, room))
        for index, group in enumerate(groups)
        if index % stride == 0
    )


def _short(group: object, most: int) -> str:
    text = "NULL" if group is None else f"{group:.4g}" if isinstance(group, float) else str(group)
    return text if len(text) <= most else text[: most - 1] + "…"


def _letters(groups: int) -> int:
    """The letters of names that stand beside each other below a picture."""
    return int((RIGHT - LEFT) / min(groups, _LABELS) / _LETTER)


def _number(value: object) -> float | None:
    """A number of a table that can be drawn; None for NULL, text, several numbers and what is beyond all measure."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None
