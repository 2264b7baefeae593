"""The functions of a row: those of `fedcore.questions.functions` that are not only of sums, by their names."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from export.questions.arithmetic import (
    Operator,
    absolute,
    arithmetic,
    bucket,
    clip,
    corners,
    divide,
    extreme,
    negative,
    product,
    real,
    remainder,
    rounded,
    truncated,
)
from export.questions.conditions import COMPARISONS, case, coalesce, comparison, connective, is_null, negation
from export.questions.expressions import Expression


def _sum_of_bounds(left: Expression, right: Expression) -> tuple[float, float]:
    return left.low + right.low, left.high + right.high


OPERATORS: Mapping[str, Operator] = {
    "+": arithmetic("+", _sum_of_bounds),
    "-": arithmetic("-", lambda left, right: (left.low - right.high, left.high - right.low)),
    "*": arithmetic("*", functools.partial(corners, product)),
    "/": divide,
    "%": remainder,
    **{name: comparison(name) for name in COMPARISONS},
    "abs": absolute,
    "and": connective("and"),
    "bucket": bucket,
    "case": case,
    "clip": clip,
    "coalesce": coalesce,
    "integer": truncated,
    "is_null": is_null,
    "max": extreme("max"),
    "min": extreme("min"),
    "negative": negative,
    "not": negation,
    "or": connective("or"),
    "real": real,
    "round": rounded,
}
"""By their names there, and two that only rows have: bucket and clip."""
