"""The groups of a question: keys of few known values, and which group a row is in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from export.questions.expressions import Batch, Expression
from fedcore.errors import QuestionError
from fedcore.questions.question import MOST_CELLS, Key, Literals


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
