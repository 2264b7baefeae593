"""Numbers of a row as typed expressions: what they may be, and the groups that keys of few values make.

Whole numbers are int64, to 2^53; real ones float64, so that what SQLite computes of a row is computed to the bit.
NULL is a row that is not valid; its number is any finite one.

Shapes: B rows; constants have no axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from export.questions.draft import LARGEST_FLOAT, MOST_EXACT, check_type
from fedcore.errors import QuestionError
from fedcore.plan import Field
from fedcore.questions.question import MOST_CELLS, Key, Literals

Kind: TypeAlias = Literal["null", "truth", "whole", "real", "either", "text"]
"""truth: 0 or 1. either: whole in some rows and real in others, as in CASE WHEN y THEN 1 ELSE 2.5 END; a real here."""
FAR = 1e300
"""Real numbers are held to this, so that arithmetic with them stays finite."""


class Numbers(NamedTuple):
    """Numbers of a batch (B,), and which rows are not NULL (B,); None if all are."""

    values: Tensor
    valid: Tensor | None


class Batch:
    """A batch of rows: fields (B, …) by name, and what was computed of them."""

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        self.fields = fields
        self._computed: dict[Expression, Numbers] = {}

    def of(self, expression: Expression) -> Numbers:
        """The numbers of an expression, which is computed once."""
        if expression not in self._computed:
            self._computed[expression] = expression.compute(self)
        return self._computed[expression]

    def rows(self, values: Tensor) -> Tensor:
        """Values, or one constant, for each row (B,)."""
        return values if values.dim() else values.expand(self._first.shape[:1])

    def constant(self, values: Tensor) -> Tensor:
        """Constants, where the rows are."""
        return values.to(self._first.device)

    @property
    def _first(self) -> Tensor:
        return next(iter(self.fields.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """Numbers of a row, equal to no other. low, high: where they lie; infinite if that is unknown. nullable: whether
    they may be NULL.

    choices: the few values that they have if all are constants, in order; a text is its place among them.
    """

    kind: Kind
    low: float
    high: float
    nullable: bool
    compute: Callable[[Batch], Numbers]
    choices: tuple[Any, ...] | None = None

    @property
    def constant(self) -> bool:
        """Whether it is one value in all rows."""
        return self.kind == "null" or (self.choices is not None and len(self.choices) == 1 and not self.nullable)

    @property
    def value(self) -> Any:
        """That value."""
        return self.choices[0] if self.choices else None

    @property
    def whole(self) -> bool:
        """Whether it is a whole number."""
        return self.kind in {"truth", "whole"}

    @property
    def bounded(self) -> bool:
        """Whether both ends are known."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def largest(self) -> float:
        """How far from 0 it may lie."""
        return max(abs(self.low), abs(self.high))


def literal(value: Literals) -> Expression:
    """A constant. Raises QuestionError for one that is too large."""
    zero = torch.tensor(0)
    if value is None:
        return Expression("null", 0, 0, True, lambda batch: Numbers(batch.constant(zero), batch.constant(zero > 0)))
    if isinstance(value, str):
        return Expression("text", 0, 0, False, lambda batch: Numbers(batch.constant(zero), None), (value,))
    kind: Kind = "real" if isinstance(value, float) else "whole"
    if not abs(value) <= (FAR if kind == "real" else MOST_EXACT):
        raise QuestionError("this constant is too large: whole numbers are exact to 2^53, real ones reach 10^300")
    number = torch.tensor(value, dtype=torch.float64 if kind == "real" else torch.int64)
    return Expression(kind, value, value, False, lambda batch: Numbers(batch.constant(number), None), (value,))


def field_of(item: Field) -> Expression:
    """A field as numbers. NaN and infinity of a real one are NULL, as is what is ignored of a whole one. Raises
    QuestionError for one that is no number.
    """
    if item.shape:
        size = " × ".join(map(str, item.shape))
        raise QuestionError(
            f"{item.name} is an array of {size} numbers, and columns are of single numbers: take another field, or ask "
            f"`muster ask normaliser {item.name}` for its mean, `muster ask histogram {item.name}`, or, of words in "
            f"uint8, `muster ask heavy-hitters {item.name}`"
        )
    check_type(item)
    if item.dtype == "float32":
        return Expression("real", -math.inf, math.inf, True, lambda batch: _finite(batch.fields[item.name]))
    if item.high is None:
        raise QuestionError(f"{item.name} is {item.dtype} of unknown range: say it, Field(…, high=N) for 0 … N − 1")
    absent = item.absent

    def compute(batch: Batch) -> Numbers:
        values = batch.fields[item.name].to(torch.int64)
        if absent is None:
            return Numbers(values, None)
        valid = values != absent
        return Numbers(torch.where(valid, values, 0), valid)

    return whole(Expression("whole", 0, item.high - 1, absent is not None, compute))


def _finite(numbers: Tensor) -> Numbers:
    valid = numbers.abs() <= LARGEST_FLOAT
    return Numbers(torch.where(valid, numbers, 0.0).to(torch.float64), valid)


def whole(expression: Expression) -> Expression:
    """The same whole number. Raises QuestionError if it may pass 2^53."""
    if expression.largest > MOST_EXACT:
        raise QuestionError(
            f"this may reach {expression.largest:,.0f}, and whole numbers are exact to 2^53: CLIP it, or what it is "
            "made of, or CAST that AS REAL"
        )
    return expression


def derived(
    kind: Kind,
    bounds: tuple[float, float],
    function: Callable[..., Tensor],
    *arguments: Expression,
    valid: Callable[..., Tensor] | None = None,
    choices: tuple[Any, ...] | None = None,
) -> Expression:
    """What a function makes of expressions; NULL where one of them is, and where `valid` of their values is not true.

    Raises QuestionError for a whole number that may pass 2^53.
    """

    def compute(batch: Batch) -> Numbers:
        numbers = [batch.of(argument) for argument in arguments]
        values = [number.values for number in numbers]
        own = None if valid is None else valid(*values)
        return Numbers(function(*values), both(own, *(number.valid for number in numbers)))

    nullable = valid is not None or any(argument.nullable for argument in arguments)
    found = Expression(kind, *bounds, nullable, compute, choices)
    return whole(found) if kind == "whole" else found


def both(*valid: Tensor | None) -> Tensor | None:
    """Where all are true; None is true everywhere."""
    known = [one for one in valid if one is not None]
    return functools.reduce(torch.logical_and, known) if known else None


def as_real(expression: Expression) -> Expression:
    """The same number as a real one."""
    if expression.kind == "real":
        return expression
    choices = None if expression.choices is None else tuple(map(float, expression.choices))
    bounds = float(expression.low), float(expression.high)
    return derived("real", bounds, lambda values: values.to(torch.float64), expression, choices=choices)


def as_whole(expression: Expression) -> Expression:
    """A truth as 0 or 1; a whole number as it is."""
    if expression.kind != "truth":
        return expression
    return derived("whole", (0, 1), lambda values: values.to(torch.int64), expression)


class GroupKey(NamedTuple):
    """A key: its column's name, its expression and its values, NULL first as in SQLite."""

    name: str
    expression: Expression
    values: tuple[Literals, ...]

    def ones(self, batch: Batch) -> Tensor:
        """Which value each row has, as 0 or 1 (B, values)."""
        numbers = batch.of(self.expression)
        values = batch.rows(numbers.values)
        kind = torch.float64 if self.expression.kind == "real" else torch.int64
        places = _places(self.expression, self.values)
        found = values.to(kind).unsqueeze(-1) == batch.constant(torch.tensor(places, dtype=kind))
        if numbers.valid is None:
            return found.to(torch.float32)
        valid = batch.rows(numbers.valid).unsqueeze(-1)
        return torch.cat([torch.logical_not(valid), torch.logical_and(found, valid)], 1).to(torch.float32)


class Groups(NamedTuple):
    """All keys; without any there is one group."""

    keys: tuple[GroupKey, ...]

    @property
    def number(self) -> int:
        """G."""
        return math.prod(len(key.values) for key in self.keys)

    @property
    def data(self) -> tuple[Key, ...]:
        """The keys of the question."""
        return tuple(Key(key.name, key.values) for key in self.keys)

    def ones(self, batch: Batch) -> Tensor:
        """Which group each row is in, as 0 or 1 (B, G); the last key is the fastest."""
        found = batch.rows(batch.constant(torch.tensor(1.0))).unsqueeze(-1)
        for key in self.keys:
            found = (found.unsqueeze(-1) * key.ones(batch).unsqueeze(-2)).flatten(1)
        return found


def group_key(name: str, expression: Expression) -> GroupKey:
    """A key. Raises QuestionError for an expression whose values are not known, or are too many."""
    null: tuple[Literals, ...] = (None,) if expression.nullable else ()
    if expression.kind == "null":
        return GroupKey(name, expression, (None,))
    if expression.choices is not None and expression.kind != "either":
        return GroupKey(name, expression, (*null, *sorted(expression.choices)))
    if not expression.whole:
        raise QuestionError(
            "GROUP BY a number that is not whole has as many groups as rows: GROUP BY WIDTH_BUCKET(x, low, high, n), "
            "or a CASE of constants"
        )
    count = int(expression.high) - int(expression.low) + 1
    if count > MOST_CELLS:
        raise QuestionError(
            f"GROUP BY has {count:,} groups here, and an answer {MOST_CELLS:,} numbers: GROUP BY WIDTH_BUCKET(x, low, "
            "high, n), a division, or a CASE of constants"
        )
    values: Sequence[int] = range(int(expression.low), int(expression.high) + 1)
    return GroupKey(name, expression, (*null, *values))


def _places(expression: Expression, values: Sequence[Literals]) -> list[Literals]:
    """The numbers that stand for values other than NULL in a batch."""
    if expression.kind == "text":
        return [(expression.choices or ()).index(value) for value in values if value is not None]
    return [value for value in values if value is not None]
