"""Functions of a question's columns, with the rules of SQLite: NULL is None, and whole numbers stay whole.

https://sqlite.org/lang_expr.html, read in 2026. `%` takes the sign of the dividend, `/` of whole numbers truncates
towards zero, and a division by zero is NULL, as is every arithmetic with NULL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, TypeAlias

Scalar: TypeAlias = int | float | str | None
Function: TypeAlias = Callable[..., Any]
TOLD = 2.0**-14
"""Of sums of squares in float32 a spread of less than this share may be rounding."""

_FARTHEST_SHIFT = 128


def _strict(function: Function) -> Function:
    """The function, NULL where an argument is."""
    return lambda *values: None if any(value is None for value in values) else function(*values)


def _arithmetic(function: Function) -> Function:
    """The function of numbers, NULL where an argument is. Raises TypeError for text, which Python would repeat.

    A whole number beyond 64 bits becomes a real one, and infinity and what is no number NULL.
    """

    def of_numbers(*values: Any) -> Any:
        if any(isinstance(value, str | tuple) for value in values):
            raise TypeError("text is no number")
        found = function(*values)
        if isinstance(found, int) and not -(2**63) <= found < 2**63:
            return float(found)
        return None if isinstance(found, float) and not math.isfinite(found) else found

    return _strict(of_numbers)


def _divided(left: float, right: float) -> float | None:
    if right == 0:
        return None
    if isinstance(left, int) and isinstance(right, int):
        whole = abs(left) // abs(right)
        return whole if (left < 0) == (right < 0) else -whole
    return left / right


def _whole(value: float) -> int:
    """A number without what is behind its point, held to 64 bits."""
    return int(max(min(value, 2**63 - 1), -(2**63)))


def _remainder(left: float, right: float) -> float | None:
    """SQLite makes both whole first, and gives a real where one of them is."""
    one, other = _whole(left), _whole(right)
    if other == 0:
        return None
    kept = abs(one) % abs(other) * (1 if one >= 0 else -1)
    return kept if isinstance(left, int) and isinstance(right, int) else float(kept)


def _rounded(value: float) -> float:
    """Half away from 0, as a real."""
    return float(int(value + (0.5 if value >= 0 else -0.5))) if abs(value) < 2**52 else float(value)


def _and(*values: Scalar) -> int | None:
    if any(value == 0 for value in values if value is not None):
        return 0
    return None if None in values else 1


def _or(*values: Scalar) -> int | None:
    if any(value != 0 for value in values if value is not None):
        return 1
    return None if None in values else 0


def _case(*values: Scalar) -> Scalar:
    """case(condition, value, condition, value, …, otherwise)."""
    for condition, value in zip(values[:-1:2], values[1::2], strict=False):
        if condition:
            return value
    return values[-1]


def _mean(total: float | None, count: float) -> float | None:
    """A sum over so many, as a real; NULL of none."""
    return None if total is None or count <= 0 else total / count


def _variance(total: float, squares: float, count: float, less: int) -> float | None:
    """The variance from Σx, Σx² and n, divided by n − `less`; NULL where that is 0 or less. Exact sums do not cancel.
    Noise may make it negative.
    """
    return None if count - less <= 0 else (squares * count - total * total) / (count * (count - less))


def _correlation(count: float, x: float, y: float, xx: float, yy: float, xy: float) -> float | None:
    """Pearson's correlation from n, Σx, Σy, Σx², Σy² and Σxy; NULL where one of both does not vary. Noise may make it
    more than 1.
    """
    if count <= 0:
        return None
    spread = (xx - x * x / count) * (yy - y * y / count)
    return None if spread <= 0 else (xy - x * y / count) / math.sqrt(spread)


def _held(function: Function, low: float, high: float) -> Function:
    """The function with its number held to bounds."""

    def held(*values: Any) -> float | None:
        found = function(*values)
        return None if found is None else max(min(found, high), low)

    return held


def _joined(shifts: Sequence[int], parts: Sequence[int]) -> int:
    """The whole number whose parts begin at these bits."""
    if max(shifts) > _FARTHEST_SHIFT:
        raise ValueError(f"a part begins at bit {max(shifts)}; the last is {_FARTHEST_SHIFT}")
    return sum(part << shift for shift, part in zip(shifts, parts, strict=True))


def _told(total: float, squares: float, count: float, share: float) -> bool:
    """Whether rounded sums tell a spread from rounding: a constant that float32 holds has exactly none."""
    spread = squares * count - total * total
    return spread == 0 or spread >= squares * count * share


def _correlation_if_told(*sums: float) -> float | None:
    """The correlation, from the same sums, and behind them the share of a spread that is told."""
    (count, x, y, xx, yy, xy), (share, *_) = sums[:6], (*sums[6:], TOLD)
    told = _told(x, xx, count, share) and _told(y, yy, count, share)
    return FUNCTIONS["correlation"](count, x, y, xx, yy, xy) if told else None


def _least(counts: Sequence[float], wanted: float, values: Sequence[Scalar]) -> Scalar:
    """The first value that at least `wanted` have; NULL if there is none."""
    return next((value for count, value in zip(counts, values, strict=True) if count >= wanted), None)


def _wanted(share: float, total: float) -> float:
    """How many of so many a share is, which is meant as it is written: 0.07 of 100 are 7, in float64 a little more."""
    return float(Fraction(repr(share)) * Fraction(total))


def _below(counts: Sequence[float]) -> list[float]:
    """How many lie below each bin, and in all. Where noise makes them fall, means that rise, and none below 0.

    This is isotonic regression. Counts held to 0 one by one would add half of the noise of every empty bin.
    """
    runs: list[tuple[float, int]] = []
    for so_far in accumulate(counts, initial=0):
        total, size = so_far, 1
        while runs and runs[-1][0] * size > total * runs[-1][1]:
            total, size = total + runs[-1][0], size + runs.pop()[1]
        runs.append((total, size))
    return [max(total / size if size > 1 else total, 0) for total, size in runs for _ in range(size)]


def _least_with_share(counts: Sequence[float], share: float, values: Sequence[Any]) -> Any:
    """The first value up to which a share of all lies; NULL of none."""
    below = _below(counts)
    wanted, found = _wanted(share, below[-1]), zip(below, below[1:], values, strict=False)
    some = below[-1] > 0
    return next(value for before, so_far, value in found if so_far > before and so_far >= wanted) if some else None


def _quantile(counts: Sequence[float], share: float, edges: Sequence[float]) -> float | None:
    """The value below which a share of all lies, from counts of bins between edges, one more than bins.

    Within a bin it is taken as a straight line.
    """
    below = _below(counts)
    index: int | None = _least_with_share(counts, share, range(len(counts)))
    if index is None:
        return None
    part = (_wanted(share, below[-1]) - below[index]) / (below[index + 1] - below[index])
    return edges[index] + max(part, 0.0) * (edges[index + 1] - edges[index])


UNHELD: Mapping[str, Function] = {
    "correlation": _correlation,
    "root": _strict(lambda value: math.copysign(math.sqrt(abs(value)), value)),
    "variance": lambda total, squares, count: _variance(total, squares, count, 1),
    "variance_of_all": lambda total, squares, count: _variance(total, squares, count, 0),
}
"""Functions whose numbers `FUNCTIONS` holds to what they may be, as noise moves them."""
FUNCTIONS: Mapping[str, Function] = {
    "+": _arithmetic(lambda left, right: left + right),
    "-": _arithmetic(lambda left, right: left - right),
    "*": _arithmetic(lambda left, right: left * right),
    "/": _arithmetic(_divided),
    "%": _arithmetic(_remainder),
    "negative": _arithmetic(lambda value: -value),
    "=": _strict(lambda left, right: int(left == right)),
    "<>": _strict(lambda left, right: int(left != right)),
    "<": _strict(lambda left, right: int(left < right)),
    "<=": _strict(lambda left, right: int(left <= right)),
    ">": _strict(lambda left, right: int(left > right)),
    ">=": _strict(lambda left, right: int(left >= right)),
    "and": _and,
    "or": _or,
    "not": _strict(lambda value: int(not value)),
    "is_null": lambda value: int(value is None),
    "case": _case,
    "coalesce": lambda *values: next((value for value in values if value is not None), None),
    "abs": _strict(abs),
    "min": _strict(lambda *values: min(reversed(values))),
    "max": _strict(max),
    "integer": _strict(_whole),
    "real": _strict(float),
    "round": _strict(_rounded),
    "joined": _joined,
    "if_each": lambda value, wanted, *counts: value if min(counts) >= wanted else None,
    "null_if_none": lambda value, count: value if count > 0 else None,
    "mean": _mean,
    "variance": _held(UNHELD["variance"], 0.0, math.inf),
    "variance_if_told": lambda total, squares, count, share=TOLD: (
        FUNCTIONS["variance_of_all"](total, squares, count) if _told(total, squares, count, share) else None
    ),
    "variance_of_all": _held(UNHELD["variance_of_all"], 0.0, math.inf),
    "root": _strict(lambda value: math.sqrt(max(value, 0.0))),
    "correlation": _held(_correlation, -1.0, 1.0),
    "correlation_if_told": _correlation_if_told,
    "least": _least,
    "greatest": lambda counts, wanted, values: _least(counts[::-1], wanted, values[::-1]),
    "least_with_share": _least_with_share,
    "quantile": _quantile,
    "total": sum,
    "item": lambda values, index: values[index],
}
"""By the name in a `Call`. Trap: min and max are SQLite's of two values and more, not aggregates."""
