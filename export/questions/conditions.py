"""Conditions, and choices by them. `and` and `or` know three values, as SQLite has them: NULL is unknown."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from export.questions.arithmetic import Operator, alike, either_of, folding
from export.questions.expressions import Batch, Expression, Kind, Numbers, both, derived, literal
from fedcore.errors import QuestionError
from fedcore.questions.functions import FUNCTIONS

COMPARISONS = {"=": torch.eq, "<>": torch.ne, "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge}


def comparison(name: str) -> Operator:
    """A comparison of numbers."""
    compare = COMPARISONS[name]

    @folding(name)
    def operator(left: Expression, right: Expression) -> Expression:
        _, (left, right) = alike(left, right)
        return derived("truth", (0, 1), compare, left, right)

    return operator


def truth(argument: Expression) -> Expression:
    """A condition: a number is true unless it is 0. Of constants, 0, 1 or NULL."""
    if argument.kind == "text":
        raise QuestionError("a text is no condition; devices compute with numbers")
    if argument.kind in {"truth", "null"}:
        return argument
    if argument.constant:
        return literal(int(argument.value != 0))
    return derived("truth", (0, 1), lambda values: values != 0, argument)


def connective(name: str) -> Operator:
    """`and` or `or`: what decides, 0 or 1, does so whatever the others are; else NULL if one is."""
    decides = int(name == "or")
    join = torch.logical_or if decides else torch.logical_and

    def operator(left: Expression, right: Expression) -> Expression:
        for one, other in itertools.permutations((truth(left), truth(right))):
            if one.constant and one.kind != "null":
                return literal(decides) if one.value == decides else other
        if left.kind == right.kind == "null":
            return left
        return _joined(truth(left), truth(right))

    def _joined(left: Expression, right: Expression) -> Expression:
        def compute(batch: Batch) -> Numbers:
            one, other = batch.of(left), batch.of(right)
            sides = [_where_valid(side, not decides) for side in (one, other)]
            valid = both(one.valid, other.valid)
            decided = functools.reduce(torch.logical_or, (_decided(side, decides) for side in (one, other)))
            return Numbers(join(*sides), None if valid is None else torch.logical_or(valid, decided))

        return Expression("truth", 0, 1, left.nullable or right.nullable, compute)

    return lambda first, *others: functools.reduce(operator, others, truth(first))


def _where_valid(numbers: Numbers, otherwise: bool) -> Tensor:
    """Truths (B,), and `otherwise` where they are NULL."""
    if numbers.valid is None:
        return numbers.values
    values = numbers.values.to(torch.bool)
    if otherwise:
        return torch.logical_or(values, torch.logical_not(numbers.valid))
    return torch.logical_and(values, numbers.valid)


def _decided(numbers: Numbers, decides: int) -> Tensor:
    """Where a truth is known and decides."""
    values = numbers.values.to(torch.bool)
    values = values if decides else torch.logical_not(values)
    return values if numbers.valid is None else torch.logical_and(values, numbers.valid)


def holds(argument: Expression, batch: Batch) -> Tensor:
    """Where a condition is true, neither false nor NULL (B,)."""
    return _where_valid(batch.of(truth(argument)), False).to(torch.bool)


def negation(argument: Expression) -> Expression:
    """NOT."""
    argument = truth(argument)
    if argument.constant:
        return literal(FUNCTIONS["not"](argument.value))
    return derived("truth", (0, 1), torch.logical_not, argument)


def is_null(argument: Expression) -> Expression:
    """Whether it is NULL, which is never NULL."""
    if argument.constant or not argument.nullable:
        return literal(int(argument.kind == "null"))

    def compute(batch: Batch) -> Numbers:
        valid = _known(batch.of(argument))
        return Numbers(torch.logical_not(valid), None)

    return Expression("truth", 0, 1, False, compute)


def _choice(condition: Expression, yes: Expression, no: Expression) -> Expression:
    """`yes` where a condition is true, else `no`."""
    condition = truth(condition)
    if condition.constant:
        return yes if condition.value else no
    kind, choices, (yes, no) = _options(yes, no)
    bounds = min(yes.low, no.low), max(yes.high, no.high)

    def compute(batch: Batch) -> Numbers:
        chosen, one, other = holds(condition, batch), batch.of(yes), batch.of(no)
        valid = None
        if not (one.valid is None and other.valid is None):
            valid = torch.logical_or(
                torch.logical_and(chosen, _known(one)), torch.logical_and(torch.logical_not(chosen), _known(other))
            )
        return Numbers(torch.where(chosen, one.values, other.values), valid)

    return Expression(kind, *bounds, yes.nullable or no.nullable, compute, choices)


def _known(numbers: Numbers) -> Tensor:
    """Where numbers are not NULL."""
    return torch.ones_like(numbers.values, dtype=torch.bool) if numbers.valid is None else numbers.valid


def _options(yes: Expression, no: Expression) -> tuple[Kind, tuple[Any, ...] | None, list[Expression]]:
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


def _absent(other: Expression) -> Expression:
    """NULL, in the type and within the bounds of another expression."""

    def compute(batch: Batch) -> Numbers:
        zeros = torch.zeros_like(batch.of(other).values)
        return Numbers(zeros, zeros.to(torch.bool))

    return Expression(other.kind, other.low, other.high, True, compute, other.choices)


def _renumbered(text: Expression, choices: tuple[Any, ...]) -> Expression:
    """The same text, by its place among other choices."""
    places = [choices.index(choice) for choice in text.choices or ()]

    def function(values: Tensor) -> Tensor:
        return sum(((values == old).to(torch.int64) * new for old, new in enumerate(places)), torch.zeros_like(values))

    return derived("text", (0, 0), function, text, choices=choices)


def case(*arguments: Expression) -> Expression:
    """case(condition, value, condition, value, …, otherwise)."""
    found = arguments[-1]
    for index in range(len(arguments) - 3, -1, -2):
        found = _choice(arguments[index], arguments[index + 1], found)
    return found


def coalesce(*arguments: Expression) -> Expression:
    """The first that is not NULL."""
    return functools.reduce(lambda found, before: _or_else(before, found), reversed(arguments))


def _or_else(argument: Expression, other: Expression) -> Expression:
    if argument.kind == "null" or not argument.nullable:
        return other if argument.kind == "null" else argument
    kind, choices, (first, second) = _options(argument, other)
    bounds = min(first.low, second.low), max(first.high, second.high)

    def compute(batch: Batch) -> Numbers:
        one, two = batch.of(first), batch.of(second)
        known = _known(one)
        return Numbers(
            torch.where(known, one.values, two.values),
            None if two.valid is None else torch.logical_or(known, two.valid),
        )

    return Expression(kind, *bounds, second.nullable, compute, choices)
