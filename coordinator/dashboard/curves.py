"""Curves as the numbers of an inline SVG: points, axes with round numbers, linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

WIDTH, HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 10, 34
_MOST_POINTS = 160
_TICKS = 4
_UNITS = {"accuracy": "share of examples", "loss": "mean per example"}
Values: TypeAlias = Sequence[tuple[float, float]]
"""Places on the horizontal axis, ascending, each with a value."""


class Point(NamedTuple):
    """A place in the picture, and what it stands for."""

    x: float
    y: float
    at: float
    value: float


class Tick(NamedTuple):
    """A number beside an axis, at a distance from the picture's left or upper edge."""

    place: float
    label: str


class Line(NamedTuple):
    """The points of one series from left to right."""

    name: str
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        """The `points` of a polyline."""
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)

    @property
    def last(self) -> Point:
        """The newest point."""
        return self.points[-1]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the same axes. unit: of the values; horizontal: what the horizontal axis counts."""

    name: str
    unit: str
    horizontal: str
    lines: tuple[Line, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    low: float
    high: float

    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM


class Scale(NamedTuple):
    """From numbers to places: `low` is at `start`, `high` at `end`; as logarithms with `log`, in steps of `least`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    least: float = 0.0

    def place(self, value: float) -> float:
        """Where a value is."""
        low, high, at = (math.log10(number) if self.log else number for number in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((at - low) / (high - low) if high > low else 0.5)

    def ticks(self) -> tuple[Tick, ...]:
        """Round numbers, a few."""
        if self.high <= self.low:
            values = [self.low]
        elif self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            stride = max(1, -(-(last - first + 1) // (_TICKS + 1)))
            values = [10.0**power for power in range(first, last + 1, stride)]
            values = values if len(values) > 1 else [self.low, self.high]
        else:
            step = max(self.least, _round_step((self.high - self.low) / _TICKS))
            values = [step * count for count in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return tuple(Tick(self.place(value), f"{value:.4g}") for value in values)


def charts(rounds: Sequence[tuple[int, Mapping[str, float]]], *, log: bool = False) -> tuple[Chart, ...]:
    """A chart for every metric with a finite value, by name, over the numbers of rounds."""
    names = sorted({name for _, metrics in rounds for name in metrics})
    series = ((name, [(number, metrics[name]) for number, metrics in rounds if name in metrics]) for name in names)
    drawn = (chart(name, {name: values}, unit_of(name), log=log) for name, values in series)
    return tuple(picture for picture in drawn if picture is not None)


def chart(
    name: str,
    series: Mapping[str, Values],
    unit: str = "",
    horizontal: str = "round",
    *,
    log: bool = False,
    whole: bool = True,
) -> Chart | None:
    """A chart of finite values by the names of their series; None without one. Long lines are thinned, ends kept.

    log: whether the values have a logarithmic axis, which those of 0 and below have no place on. whole: whether the
    horizontal axis has whole numbers only.
    """
    kept = {label: _thinned([pair for pair in values if _has_place(pair[1], log)]) for label, values in series.items()}
    kept = {label: values for label, values in kept.items() if values}
    if not kept:
        return None
    ats, values = ([pair[part] for pairs in kept.values() for pair in pairs] for part in (0, 1))
    across = Scale(min(ats), max(ats), _LEFT, WIDTH - _RIGHT, least=1.0 if whole else 0.0)
    up = Scale(min(values), max(values), HEIGHT - _BOTTOM, _TOP, log)
    lines = (
        Line(label, tuple(Point(across.place(at), up.place(value), at, value) for at, value in pairs))
        for label, pairs in kept.items()
    )
    return Chart(name, unit, horizontal, tuple(lines), across.ticks(), up.ticks(), up.low, up.high)


def unit_of(metric: str) -> str:
    """The unit of a metric by the last part of its name; "" where that says nothing."""
    return _UNITS.get(metric.rpartition(".")[2], "")


def _has_place(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _thinned(values: Values) -> Values:
    stride = math.ceil(len(values) / _MOST_POINTS) or 1
    return [*values[:-1:stride], *values[-1:]]


def _round_step(step: float) -> float:
    """The next number of 1, 2 or 5 times a power of ten that is no smaller."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))
