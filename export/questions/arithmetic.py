"""Arithmetic, conditions and choices, with the rules of SQLite (https://www.sqlite.org/lang_expr.html).

Whole numbers divide to whole ones, towards 0; a division by 0 is NULL, as is every arithmetic with NULL. Constants are
computed here, by `fedcore.questions.functions`. All functions raise QuestionError for what they are not made for; the
caller adds the place.

Only operators that both ONNX and ExecuTorch have: neither `remainder` of negative numbers nor `maximum` of whole ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from export.questions import expressions
from export.questions.draft import MOST_EXACT
from fedcore.errors import QuestionError
from fedcore.questions.functions import FUNCTIONS
from fedcore.questions.question import MOST_CELLS

Operator = Callable[..., expressions.Expression]
"""Expressions to an expression."""


def folding(name: str) -> Callable[[Operator], Operator]:
    """An operator of numbers that computes constants at once, and NULL of the constant NULL."""

    def decorate(operator: Operator) -> Operator:
        @functools.wraps(operator)
        def folded(*arguments: expressions.Expression) -> expressions.Expression:
            if any(argument.kind == "text" for argument in arguments):
                raise QuestionError(f"{name.upper()} of text; devices compute with numbers")
            if any(argument.kind == "null" for argument in arguments):
                return expressions.literal(None)
            if all(argument.constant for argument in arguments):
                return expressions.literal(FUNCTIONS[name](*(argument.value for argument in arguments)))
            return operator(*arguments)

        return folded

    return decorate


def product(left: float, right: float) -> float:
    """A product of bounds: 0 times infinity is 0."""
    return 0 if 0 in {left, right} else left * right


def corners(
    function: Callable[[Any, Any], Any], left: expressions.Expression, right: expressions.Expression
) -> tuple[float, float]:
    """The bounds of a function that is monotone in each of its numbers."""
    ends = [function(one, other) for one in (left.low, left.high) for other in (right.low, right.high)]
    return min(ends), max(ends)


def _held(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Real numbers, held to ±FAR unless they are known to lie there."""
    return (
        values
        if -expressions.FAR < bounds[0] <= bounds[1] < expressions.FAR
        else values.clamp(-expressions.FAR, expressions.FAR)
    )


def alike(*arguments: expressions.Expression) -> tuple[expressions.Kind, list[expressions.Expression]]:
    """The kind of numbers that arithmetic gives, and the arguments as torch needs them."""
    if all(argument.whole for argument in arguments):
        return "whole", [expressions.as_whole(argument) for argument in arguments]
    kind: expressions.Kind = "real" if any(argument.kind == "real" for argument in arguments) else "either"
    return kind, [expressions.as_real(argument) for argument in arguments]


def arithmetic(
    name: str, bounds: Callable[[expressions.Expression, expressions.Expression], tuple[float, float]]
) -> Operator:
    """+, - or *. bounds: of what it gives."""
    functions: dict[str, Callable[..., Tensor]] = {"+": torch.add, "-": torch.sub, "*": torch.mul}
    function = functions[name]

    @folding(name)
    def operator(left: expressions.Expression, right: expressions.Expression) -> expressions.Expression:
        kind, (left, right) = alike(left, right)
        ends = bounds(left, right)
        if kind == "whole":
            return expressions.derived(kind, ends, function, left, right)
        return expressions.derived(kind, ends, lambda one, other: _held(function(one, other), ends), left, right)

    return operator


@folding("/")
def divide(left: expressions.Expression, right: expressions.Expression) -> expressions.Expression:
    """A quotient; of whole numbers towards 0."""
    if "either" in {left.kind, right.kind} and "real" not in {left.kind, right.kind}:
        raise QuestionError(
            "here a number is whole in some rows only, and whole numbers divide by another rule: CAST it AS REAL"
        )
    kind, (left, right) = alike(left, right)
    if right.low == right.high == 0:
        return expressions.literal(None)
    divisors = [end for end in (right.low, -1, 1, right.high) if end and right.low <= end <= right.high]
    by_zero = None if right.low > 0 or right.high < 0 else (lambda _, values: values != 0)
    if kind == "whole":
        ends = [FUNCTIONS["/"](int(end), int(divisor)) for end in (left.low, left.high) for divisor in divisors]
        return expressions.derived(kind, (min(ends), max(ends)), _whole_quotient, left, right, valid=by_zero)
    bounds = corners(lambda one, other: one / other, left, right) if by_zero is None else (-math.inf, math.inf)
    bounds = (-math.inf, math.inf) if any(map(math.isnan, bounds)) else bounds
    return expressions.derived(
        kind, bounds, lambda one, other: _held(one / _not_zero(other), bounds), left, right, valid=by_zero
    )


def _not_zero(values: Tensor) -> Tensor:
    return torch.where(values == 0, torch.ones_like(values), values)


def _whole_quotient(left: Tensor, right: Tensor) -> Tensor:
    return torch.floor_divide(left.abs(), _not_zero(right.abs())) * left.sign() * right.sign()


@folding("%")
def remainder(left: expressions.Expression, right: expressions.Expression) -> expressions.Expression:
    """SQLite makes both whole first, and gives a real where one of them is."""
    kind, _ = alike(left, right)
    left, right = expressions.as_whole(truncated(left)), expressions.as_whole(truncated(right))
    if right.constant and right.value == 0:
        return expressions.literal(None)
    most = max(right.largest - 1, 0)
    bounds = -min(max(-left.low, 0), most), min(max(left.high, 0), most)
    by_zero = None if right.low > 0 or right.high < 0 else (lambda _, values: values != 0)
    found = expressions.derived(
        "whole", bounds, lambda one, other: one - other * _whole_quotient(one, other), left, right, valid=by_zero
    )
    return found if kind == "whole" else _of_kind(kind, expressions.as_real(found))


def _of_kind(kind: expressions.Kind, expression: expressions.Expression) -> expressions.Expression:
    """The same numbers, of a kind that torch holds in the same way."""
    if expression.kind == kind:
        return expression
    bounds = expression.low, expression.high
    return expressions.derived(kind, bounds, lambda values: values, expression, choices=expression.choices)


@folding("integer")
def truncated(argument: expressions.Expression) -> expressions.Expression:
    """CAST(… AS INTEGER): towards 0."""
    if argument.whole:
        return argument
    if argument.largest > MOST_EXACT:
        raise QuestionError("a real number without bounds cannot become whole: CLIP(x, low, high) it before")
    return expressions.derived(
        "whole", (int(argument.low), int(argument.high)), lambda values: values.to(torch.int64), argument
    )


@folding("real")
def real(argument: expressions.Expression) -> expressions.Expression:
    """CAST(… AS REAL)."""
    return expressions.as_real(argument)


@folding("round")
def rounded(argument: expressions.Expression) -> expressions.Expression:
    """Half away from 0; a real number, also of a whole one."""
    real = expressions.as_real(argument)
    if argument.whole:
        return real
    if real.largest > MOST_EXACT / 2:
        raise QuestionError("a real number without bounds cannot be rounded: CLIP(x, low, high) it before")
    bounds = FUNCTIONS["round"](real.low), FUNCTIONS["round"](real.high)

    def function(values: Tensor) -> Tensor:
        away = 0.5 - (values < 0).to(torch.float64)
        return (values + away).to(torch.int64).to(torch.float64)

    return expressions.derived("real", bounds, function, real)


@folding("negative")
def negative(argument: expressions.Expression) -> expressions.Expression:
    """The opposite number."""
    argument = expressions.as_whole(argument)
    return expressions.derived(argument.kind, (-argument.high, -argument.low), lambda values: values * -1, argument)


@folding("abs")
def absolute(argument: expressions.Expression) -> expressions.Expression:
    """The number without its sign."""
    argument = expressions.as_whole(argument)
    low = 0 if argument.low <= 0 <= argument.high else min(abs(argument.low), abs(argument.high))
    return expressions.derived(argument.kind, (low, argument.largest), torch.abs, argument)


def extreme(name: str) -> Operator:
    """min or max of numbers, as SQLite has them."""
    compared, pick = (torch.le, min) if name == "min" else (torch.ge, max)

    @folding(name)
    def operator(left: expressions.Expression, right: expressions.Expression) -> expressions.Expression:
        kind, (left, right) = either_of(left, right)
        bounds = pick(left.low, right.low), pick(left.high, right.high)
        return expressions.derived(
            kind, bounds, lambda one, other: torch.where(compared(one, other), one, other), left, right
        )

    return lambda first, *others: functools.reduce(operator, others, first)


def either_of(*arguments: expressions.Expression) -> tuple[expressions.Kind, list[expressions.Expression]]:
    """The kind of what is one of some numbers, and these as torch needs them."""
    if all(argument.kind == "real" for argument in arguments):
        return "real", list(arguments)
    kind, converted = alike(*arguments)
    return ("whole" if kind == "whole" else "either"), converted


def clip(
    argument: expressions.Expression, low: expressions.Expression, high: expressions.Expression
) -> expressions.Expression:
    """CLIP(x, low, high): what is below low is low, what is above high is high."""
    if not all(end.constant and end.kind in {"whole", "real"} for end in (low, high)) or low.value > high.value:
        raise QuestionError("CLIP takes two constants, the lower one first")
    if argument.kind == "null":
        return argument
    if not (argument.whole and low.whole and high.whole):
        argument, low, high = real(argument), expressions.as_real(low), expressions.as_real(high)
    return extreme("max")(extreme("min")(argument, high), low)


def bucket(argument: expressions.Expression, *ends: expressions.Expression) -> expressions.Expression:
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

    real = expressions.as_real(argument)
    bounds = (sum(edge <= end for edge in edges) for end in (real.low, real.high))
    return expressions.derived("whole", (next(bounds), next(bounds)), function, real)


def edges_of(low: float, high: float, count: int) -> list[float]:
    """The edges of equal parts of low … high, one more than parts."""
    return [low + (high - low) * (index / count) for index in range(count)] + [float(high)]


COMPARISONS = {"=": torch.eq, "<>": torch.ne, "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge}


def comparison(name: str) -> Operator:
    """A comparison of numbers."""
    compare = COMPARISONS[name]

    @folding(name)
    def operator(left: expressions.Expression, right: expressions.Expression) -> expressions.Expression:
        _, (left, right) = alike(left, right)
        return expressions.derived("truth", (0, 1), compare, left, right)

    return operator


def truth(argument: expressions.Expression) -> expressions.Expression:
    """A condition: a number is true unless it is 0. Of constants, 0, 1 or NULL."""
    if argument.kind == "text":
        raise QuestionError("a text is no condition; devices compute with numbers")
    if argument.kind in {"truth", "null"}:
        return argument
    if argument.constant:
        return expressions.literal(int(argument.value != 0))
    return expressions.derived("truth", (0, 1), lambda values: values != 0, argument)


def connective(name: str) -> Operator:
    """`and` or `or`: what decides, 0 or 1, does so whatever the others are; else NULL if one is."""
    decides = int(name == "or")
    join = torch.logical_or if decides else torch.logical_and

    def operator(left: expressions.Expression, right: expressions.Expression) -> expressions.Expression:
        for one, other in itertools.permutations((truth(left), truth(right))):
            if one.constant and one.kind != "null":
                return expressions.literal(decides) if one.value == decides else other
        if left.kind == right.kind == "null":
            return left
        return _joined(truth(left), truth(right))

    def _joined(left: expressions.Expression, right: expressions.Expression) -> expressions.Expression:
        def compute(batch: expressions.Batch) -> expressions.Numbers:
            one, other = batch.of(left), batch.of(right)
            sides = [_where_valid(side, not decides) for side in (one, other)]
            valid = expressions.both(one.valid, other.valid)
            decided = functools.reduce(torch.logical_or, (_decided(side, decides) for side in (one, other)))
            return expressions.Numbers(join(*sides), None if valid is None else torch.logical_or(valid, decided))

        return expressions.Expression("truth", 0, 1, left.nullable or right.nullable, compute)

    return lambda first, *others: functools.reduce(operator, others, truth(first))


def _where_valid(numbers: expressions.Numbers, otherwise: bool) -> Tensor:
    """Truths (B,), and `otherwise` where they are NULL."""
    if numbers.valid is None:
        return numbers.values
    values = numbers.values.to(torch.bool)
    if otherwise:
        return torch.logical_or(values, torch.logical_not(numbers.valid))
    return torch.logical_and(values, numbers.valid)


def _decided(numbers: expressions.Numbers, decides: int) -> Tensor:
    """Where a truth is known and decides."""
    values = numbers.values.to(torch.bool)
    values = values if decides else torch.logical_not(values)
    return values if numbers.valid is None else torch.logical_and(values, numbers.valid)


def holds(argument: expressions.Expression, batch: expressions.Batch) -> Tensor:
    """Where a condition is true, neither false nor NULL (B,)."""
    return _where_valid(batch.of(truth(argument)), False).to(torch.bool)


def negation(argument: expressions.Expression) -> expressions.Expression:
    """NOT."""
    argument = truth(argument)
    if argument.constant:
        return expressions.literal(FUNCTIONS["not"](argument.value))
    return expressions.derived("truth", (0, 1), torch.logical_not, argument)


def is_null(argument: expressions.Expression) -> expressions.Expression:
    """Whether it is NULL, which is never NULL."""
    if argument.constant or not argument.nullable:
        return expressions.literal(int(argument.kind == "null"))

    def compute(batch: expressions.Batch) -> expressions.Numbers:
        valid = _known(batch.of(argument))
        return expressions.Numbers(torch.logical_not(valid), None)

    return expressions.Expression("truth", 0, 1, False, compute)


def _choice(
    condition: expressions.Expression, yes: expressions.Expression, no: expressions.Expression
) -> expressions.Expression:
    """`yes` where a condition is true, else `no`."""
    condition = truth(condition)
    if condition.constant:
        return yes if condition.value else no
    kind, choices, (yes, no) = _options(yes, no)
    bounds = min(yes.low, no.low), max(yes.high, no.high)

    def compute(batch: expressions.Batch) -> expressions.Numbers:
        chosen, one, other = holds(condition, batch), batch.of(yes), batch.of(no)
        valid = None
        if not (one.valid is None and other.valid is None):
            valid = torch.logical_or(
                torch.logical_and(chosen, _known(one)), torch.logical_and(torch.logical_not(chosen), _known(other))
            )
        return expressions.Numbers(torch.where(chosen, one.values, other.values), valid)

    return expressions.Expression(kind, *bounds, yes.nullable or no.nullable, compute, choices)


def _known(numbers: expressions.Numbers) -> Tensor:
    """Where numbers are not NULL."""
    return torch.ones_like(numbers.values, dtype=torch.bool) if numbers.valid is None else numbers.valid


def _options(
    yes: expressions.Expression, no: expressions.Expression
) -> tuple[expressions.Kind, tuple[Any, ...] | None, list[expressions.Expression]]:
    """The kind of what is one of two expressions, the choices if both are of constants, and both in one type."""
    if {yes.kind, no.kind} == {"null"}:
        return "null", None, [yes, no]
    if "null" in {yes.kind, no.kind}:
        other = no if yes.kind == "null" else yes
        absent = _absent(other)
        return other.kind, other.choices, [absent, other] if yes.kind == "null" else [other, absent]
    texts = [option.kind == "text" for option in (yes, no)]
    if any(texts) and not all(texts):
        raise QuestionError("here a value is a text in some rows and a number in others")
    choices = None
    if yes.choices is not None and no.choices is not None:
        choices = tuple(dict.fromkeys((*yes.choices, *no.choices)))
    if all(texts):
        return "text", choices, [_renumbered(option, choices or ()) for option in (yes, no)]
    if yes.kind == no.kind:
        return yes.kind, choices, [yes, no]
    kind, alike = either_of(yes, no)
    return kind, choices, alike


def _absent(other: expressions.Expression) -> expressions.Expression:
    """NULL, in the type and within the bounds of another expression."""

    def compute(batch: expressions.Batch) -> expressions.Numbers:
        zeros = torch.zeros_like(batch.of(other).values)
        return expressions.Numbers(zeros, zeros.to(torch.bool))

    return expressions.Expression(other.kind, other.low, other.high, True, compute, other.choices)


def _renumbered(text: expressions.Expression, choices: tuple[Any, ...]) -> expressions.Expression:
    """The same text, by its place among other choices."""
    places = [choices.index(choice) for choice in text.choices or ()]

    def function(values: Tensor) -> Tensor:
        return sum(((values == old).to(torch.int64) * new for old, new in enumerate(places)), torch.zeros_like(values))

    return expressions.derived("text", (0, 0), function, text, choices=choices)


def case(*arguments: expressions.Expression) -> expressions.Expression:
    """case(condition, value, condition, value, …, otherwise)."""
    found = arguments[-1]
    for index in range(len(arguments) - 3, -1, -2):
        found = _choice(arguments[index], arguments[index + 1], found)
    return found


def coalesce(*arguments: expressions.Expression) -> expressions.Expression:
    """The first that is not NULL."""
    return functools.reduce(lambda found, before: _or_else(before, found), reversed(arguments))


def _or_else(argument: expressions.Expression, other: expressions.Expression) -> expressions.Expression:
    if argument.kind == "null" or not argument.nullable:
        return other if argument.kind == "null" else argument
    kind, choices, (first, second) = _options(argument, other)
    bounds = min(first.low, second.low), max(first.high, second.high)

    def compute(batch: expressions.Batch) -> expressions.Numbers:
        one, two = batch.of(first), batch.of(second)
        known = _known(one)
        return expressions.Numbers(
            torch.where(known, one.values, two.values),
            None if two.valid is None else torch.logical_or(known, two.valid),
        )

    return expressions.Expression(kind, *bounds, second.nullable, compute, choices)


OPERATORS: Mapping[str, Operator] = {
    "+": arithmetic("+", lambda left, right: (left.low + right.low, left.high + right.high)),
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
"""By their names in `fedcore.questions.functions`, and two that only rows have: bucket and clip."""
