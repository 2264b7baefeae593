"""Arithmetic of expressions, with the rules of SQLite (https://sqlite.org/lang_expr.html, read in 2026).

Whole numbers divide to whole ones, towards 0; a division by 0 is NULL, as is every arithmetic with NULL. Constants are
computed here, by `fedcore.questions.functions`. All functions raise QuestionError for what they are not made for; the
caller adds the place.

Only operators that both ONNX and ExecuTorch have: neither `remainder` of negative numbers nor `maximum` of whole ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from export.questions.expressions import FAR, Expression, Kind, as_real, as_whole, derived, literal
from export.questions.terms import MOST_EXACT
from fedcore.errors import QuestionError
from fedcore.questions.functions import FUNCTIONS
from fedcore.questions.question import MOST_CELLS

Operator = Callable[..., Expression]
"""Expressions to an expression."""


def folding(name: str) -> Callable[[Operator], Operator]:
    """An operator of numbers that computes constants at once, and NULL of the constant NULL."""

    def decorate(operator: Operator) -> Operator:
        @functools.wraps(operator)
        def folded(*arguments: Expression) -> Expression:
            if any(argument.kind == "text" for argument in arguments):
                raise QuestionError(f"{name.upper()} of text; devices compute with numbers")
            if any(argument.kind == "null" for argument in arguments):
                return literal(None)
            if all(argument.constant for argument in arguments):
                return literal(FUNCTIONS[name](*(argument.value for argument in arguments)))
            return operator(*arguments)

        return folded

    return decorate


def product(left: float, right: float) -> float:
    """A product of bounds: 0 times infinity is 0."""
    return 0 if 0 in {left, right} else left * right


def corners(function: Callable[[Any, Any], Any], left: Expression, right: Expression) -> tuple[float, float]:
    """The bounds of a function that is monotone in each of its numbers."""
    ends = [function(one, other) for one in (left.low, left.high) for other in (right.low, right.high)]
    return min(ends), max(ends)


def _held(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Real numbers, held to ±FAR unless they are known to lie there."""
    return values if -FAR < bounds[0] <= bounds[1] < FAR else values.clamp(-FAR, FAR)


def alike(*arguments: Expression) -> tuple[Kind, list[Expression]]:
    """The kind of numbers that arithmetic gives, and the arguments as torch needs them."""
    if all(argument.whole for argument in arguments):
        return "whole", [as_whole(argument) for argument in arguments]
    kind: Kind = "real" if any(argument.kind == "real" for argument in arguments) else "either"
    return kind, [as_real(argument) for argument in arguments]


def arithmetic(name: str, bounds: Callable[[Expression, Expression], tuple[float, float]]) -> Operator:
    """+, - or *. bounds: of what it gives."""
    functions: dict[str, Callable[..., Tensor]] = {"+": torch.add, "-": torch.sub, "*": torch.mul}
    function = functions[name]

    @folding(name)
    def operator(left: Expression, right: Expression) -> Expression:
        kind, (left, right) = alike(left, right)
        ends = bounds(left, right)
        if kind == "whole":
            return derived(kind, ends, function, left, right)
        return derived(kind, ends, lambda one, other: _held(function(one, other), ends), left, right)

    return operator


@folding("/")
def divide(left: Expression, right: Expression) -> Expression:
    """A quotient; of whole numbers towards 0."""
    if "either" in {left.kind, right.kind} and "real" not in {left.kind, right.kind}:
        raise QuestionError(
            "here a number is whole in some rows only, and whole numbers divide by another rule: CAST it AS REAL"
        )
    kind, (left, right) = alike(left, right)
    if right.constant and right.value == 0:
        return literal(None)
    divisors = [end for end in (right.low, -1, 1, right.high) if end and right.low <= end <= right.high]
    by_zero = None if right.low > 0 or right.high < 0 else (lambda _, values: values != 0)
    if kind == "whole":
        ends = [_towards_zero(end, divisor) for end in (left.low, left.high) for divisor in divisors]
        return derived(kind, (min(ends), max(ends)), _whole_quotient, left, right, valid=by_zero)
    bounds = corners(lambda one, other: one / other, left, right) if by_zero is None else (-math.inf, math.inf)
    bounds = (-math.inf, math.inf) if any(map(math.isnan, bounds)) else bounds
    return derived(kind, bounds, lambda one, other: _held(one / _not_zero(other), bounds), left, right, valid=by_zero)


def _towards_zero(value: float, divisor: float) -> int:
    quotient = abs(int(value)) // abs(int(divisor))
    return quotient if (value < 0) == (divisor < 0) else -quotient


def _not_zero(values: Tensor) -> Tensor:
    return torch.where(values == 0, torch.ones_like(values), values)


def _whole_quotient(left: Tensor, right: Tensor) -> Tensor:
    return torch.floor_divide(left.abs(), _not_zero(right.abs())) * left.sign() * right.sign()


@folding("%")
def remainder(left: Expression, right: Expression) -> Expression:
    """SQLite makes both whole first, and gives a real where one of them is."""
    kind, _ = alike(left, right)
    left, right = as_whole(truncated(left)), as_whole(truncated(right))
    if right.constant and right.value == 0:
        return literal(None)
    most = max(right.largest - 1, 0)
    bounds = -min(max(-left.low, 0), most), min(max(left.high, 0), most)
    by_zero = None if right.low > 0 or right.high < 0 else (lambda _, values: values != 0)
    found = derived(
        "whole", bounds, lambda one, other: one - other * _whole_quotient(one, other), left, right, valid=by_zero
    )
    return found if kind == "whole" else _of_kind(kind, as_real(found))


def _of_kind(kind: Kind, expression: Expression) -> Expression:
    """The same numbers, of a kind that torch holds in the same way."""
    if expression.kind == kind:
        return expression
    bounds = expression.low, expression.high
    return derived(kind, bounds, lambda values: values, expression, choices=expression.choices)


@folding("integer")
def truncated(argument: Expression) -> Expression:
    """CAST(… AS INTEGER): towards 0."""
    if argument.whole:
        return argument
    if argument.largest > MOST_EXACT:
        raise QuestionError("a real number without bounds cannot become whole: CLIP(x, low, high) it before")
    return derived("whole", (int(argument.low), int(argument.high)), lambda values: values.to(torch.int64), argument)


@folding("real")
def real(argument: Expression) -> Expression:
    """CAST(… AS REAL)."""
    return as_real(argument)


@folding("round")
def rounded(argument: Expression) -> Expression:
    """Half away from 0; a real number, also of a whole one."""
    real = as_real(argument)
    if argument.whole:
        return real
    if real.largest > MOST_EXACT / 2:
        raise QuestionError("a real number without bounds cannot be rounded: CLIP(x, low, high) it before")
    bounds = FUNCTIONS["round"](real.low), FUNCTIONS["round"](real.high)

    def function(values: Tensor) -> Tensor:
        away = 0.5 - (values < 0).to(torch.float64)
        return (values + away).to(torch.int64).to(torch.float64)

    return derived("real", bounds, function, real)


@folding("negative")
def negative(argument: Expression) -> Expression:
    """The opposite number."""
    argument = as_whole(argument)
    return derived(argument.kind, (-argument.high, -argument.low), lambda values: values * -1, argument)


@folding("abs")
def absolute(argument: Expression) -> Expression:
    """The number without its sign."""
    argument = as_whole(argument)
    low = 0 if argument.low <= 0 <= argument.high else min(abs(argument.low), abs(argument.high))
    return derived(argument.kind, (low, argument.largest), torch.abs, argument)


def extreme(name: str) -> Operator:
    """min or max of numbers, as SQLite has them."""
    compared, pick = (torch.le, min) if name == "min" else (torch.ge, max)

    @folding(name)
    def operator(left: Expression, right: Expression) -> Expression:
        kind, (left, right) = either_of(left, right)
        bounds = pick(left.low, right.low), pick(left.high, right.high)
        return derived(kind, bounds, lambda one, other: torch.where(compared(one, other), one, other), left, right)

    return lambda first, *others: functools.reduce(operator, others, first)


def either_of(*arguments: Expression) -> tuple[Kind, list[Expression]]:
    """The kind of what is one of some numbers, and these as torch needs them."""
    if all(argument.kind == "real" for argument in arguments):
        return "real", list(arguments)
    kind, converted = alike(*arguments)
    return ("whole" if kind == "whole" else "either"), converted


def clip(argument: Expression, low: Expression, high: Expression) -> Expression:
    """CLIP(x, low, high): what is below low is low, what is above high is high."""
    if not all(end.constant and end.kind in {"whole", "real"} for end in (low, high)) or low.value > high.value:
        raise QuestionError("CLIP takes two constants, the lower one first")
    if argument.kind == "null":
        return argument
    if not (argument.whole and low.whole and high.whole):
        argument, low, high = real(argument), as_real(low), as_real(high)
    return extreme("max")(extreme("min")(argument, high), low)


def bucket(argument: Expression, *ends: Expression) -> Expression:
    """WIDTH_BUCKET(x, low, high, n): 1 … n for equal parts of low … high, 0 below them and n + 1 from high on."""
    low, high, count = (end.value if end.constant else None for end in ends)
    numbers = [end for end in (low, high) if isinstance(end, int | float)]
    if len(numbers) < 2 or not isinstance(count, int) or numbers[0] >= numbers[1]:
        raise QuestionError("WIDTH_BUCKET takes a number, two constants, the lower one first, and a whole number")
    if not 1 <= count <= MOST_CELLS:
        raise QuestionError(f"WIDTH_BUCKET makes 1 to {MOST_CELLS:,} parts, not {count:,}")
    if argument.kind in {"null", "text"} or argument.constant:
        raise QuestionError("WIDTH_BUCKET takes a number of the row")
    edges = edges_of(numbers[0], numbers[1], count)
    tensor = torch.tensor(edges, dtype=torch.float64)

    def function(values: Tensor) -> Tensor:
        return (values.unsqueeze(-1) >= tensor.to(values.device)).to(torch.float32).sum(-1).to(torch.int64)

    real = as_real(argument)
    bounds = (sum(edge <= end for edge in edges) for end in (real.low, real.high))
    return derived("whole", (next(bounds), next(bounds)), function, real)


def edges_of(low: float, high: float, count: int) -> list[float]:
    """The edges of equal parts of low … high, one more than parts."""
    return [low + (high - low) * (index / count) for index in range(count)] + [float(high)]
