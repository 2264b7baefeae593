"""Learning curves as the numbers of an inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 320, 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 8, 8, 8, 8
_MOST_POINTS = 160


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the picture, and its value."""

    x: float
    y: float
    number: int
    value: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the rounds: its points from left to right, and the ends of its scale."""

    name: str
    points: tuple[Point, ...]
    low: float
    high: float

    @property
    def path(self) -> str:
        """The `points` of a polyline."""
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)

    @property
    def last(self) -> Point:
        """The newest point."""
        return self.points[-1]


def curves(rounds: Sequence[tuple[int, dict[str, float]]]) -> list[Curve]:
    """A curve for every metric with a finite value, by name; long ones are thinned, their ends kept."""
    names = sorted({name for _, metrics in rounds for name in metrics})
    found = []
    for name in names:
        values = [(number, metrics[name]) for number, metrics in rounds if math.isfinite(metrics.get(name, math.nan))]
        if values:
            found.append(_curve(name, values))
    return found


def _curve(name: str, values: Sequence[tuple[int, float]]) -> Curve:
    stride = math.ceil(len(values) / _MOST_POINTS)
    kept = [*values[:-1:stride], values[-1]]
    low, high = min(value for _, value in kept), max(value for _, value in kept)
    first, last = kept[0][0], kept[-1][0]
    points = (
        Point(
            _LEFT + (WIDTH - _LEFT - _RIGHT) * _share(number, first, last),
            HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * _share(value, low, high),
            number,
            value,
        )
        for number, value in kept
    )
    return Curve(name, tuple(points), low, high)


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5
