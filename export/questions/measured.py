"""Fields as what built-in questions make of them: numbers within bounds, units of the middle of a range, and bins.

Shapes: B rows, E elements of a field in a row, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from fedcore.errors import QuestionError
from fedcore.plan import Dtype, Field
from fedcore.validation import offered

Fields = Mapping[str, Tensor]
LARGEST_STEP = 1 << 18
"""The most comparisons of one row: a phone holds those of a whole batch at once."""
LARGEST_FLOAT = float(torch.finfo(torch.float32).max)
MOST_EXACT = 1 << 53
"""Whole numbers to here are exact in float64, in which answers are read."""


def field_of(name: str, fields: Sequence[Field]) -> Field:
    """The field of that name. Raises QuestionError."""
    found = {field.name: field for field in fields}
    if name not in found:
        raise QuestionError(f"no field is called {name!r}; {offered(name, found)}")
    check_type(found[name])
    return found[name]


def check_type(field: Field) -> None:
    """Raise QuestionError for a field of a type that no device has, as data sets may have some."""
    kinds = get_args(Dtype)
    if field.dtype not in kinds:
        raise QuestionError(f"{field.name} is {field.dtype}; make it one of {', '.join(kinds)}, which devices hold")


def smallest(fields: Sequence[Field]) -> Field:
    """The field of which rows are counted where none is asked about: of few numbers, and whole ones of known range."""
    return min(fields, key=lambda field: (field.dtype != "float32" and field.high is None, math.prod(field.shape)))


class Measured(NamedTuple):
    """A field and the bounds of its values, both included; None where there are none.

    each: for units, bounds of every element of its own.
    """

    field: Field
    low: float | None
    high: float | None
    each: tuple[Measured, ...] = ()

    @classmethod
    def of(cls, field: Field, low: float | None = None, high: float | None = None) -> Measured:
        """A field within bounds, by default those that whole numbers have anyway. Raises QuestionError."""
        name, whole = field.name, field.dtype != "float32"
        if whole and field.high is not None:
            low, high = 0 if low is None else low, field.high - 1 if high is None else high
        if (low is None) != (high is None):
            raise QuestionError(f"{name} has one bound; say both, low and high")
        if low is None or high is None:
            return cls(field, None, None)
        if not (math.isfinite(low) and math.isfinite(high) and low <= high) or (low == high and not whole):
            raise QuestionError(f"{name} has bounds {low:g} to {high:g}; low must be less than high")
        if whole and not (float(low).is_integer() and float(high).is_integer() and max(-low, high) < MOST_EXACT):
            raise QuestionError(f"{name} holds whole numbers, and its bounds {low:g} to {high:g} are none")
        return cls(field, int(low), int(high)) if whole else cls(field, float(low), float(high))

    @classmethod
    def of_each(cls, field: Field, low: Sequence[float], high: Sequence[float]) -> Measured:
        """A field whose elements have bounds of their own. Raises QuestionError."""
        each = tuple(cls.of(field, *ends) for ends in zip(low, high, strict=True))
        return cls(field, min(low), max(high), each)

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.field.dtype != "float32"

    @property
    def full(self) -> bool:
        """Whether no value is NULL."""
        return self.whole and self.field.absent is None

    @property
    def elements(self) -> int:
        """E, the numbers of a row."""
        return math.prod(self.field.shape)

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds. Raises QuestionError where there are none."""
        if self.low is None or self.high is None:
            raise QuestionError(f"say between which bounds {self.field.name} lies: low and high")
        return self.low, self.high

    @property
    def middle(self) -> float:
        """The middle of the range; 0 without one."""
        if self.low is None or self.high is None:
            return 0.0
        return (self.low + self.high) // 2 if self.whole else (self.low + self.high) / 2

    @property
    def half(self) -> float:
        """No value within the bounds is further from the middle; 1 without bounds."""
        return 1.0 if self.low is None or self.high is None else max(float(self.high - self.middle), 1.0 * self.whole)

    def numbers(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """The values (B, E), int64 or float32, those that are NULL as 0; and which are not NULL, (B, E)."""
        values = fields[self.field.name].reshape(-1, self.elements)
        values = values.long() if self.whole else values
        if self.full:
            return values, torch.ones_like(values, dtype=torch.bool)
        valid = values.ne(self.field.absent or 0) if self.whole else values.abs() <= LARGEST_FLOAT
        return torch.where(valid, values, torch.zeros_like(values)), valid

    def units(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """Values held to the bounds, (B, E) within −1 … 1 of the middle, NULL as 0; and which are not NULL, 1 or 0."""
        values, valid = self.numbers(fields)
        if self.each:
            columns = [[each.low, each.high, each.middle] for each in self.each]
            low, high, middle = torch.tensor(columns, dtype=values.dtype).T.contiguous()
            values = torch.minimum(torch.maximum(values, low), high) - middle
        elif self.low is not None and self.high is not None:
            values = values.clamp(self.low, self.high) - self.middle
        half = torch.tensor([each.half for each in self.each], dtype=torch.float32) if self.each else self.half
        units = values.to(torch.float32) / half
        return torch.where(valid, units, torch.zeros_like(units)), valid.to(torch.float32)


@dataclass(frozen=True, slots=True)
class Bins:
    """Bins of a field's values. edges: of them in ascending order, one more than bins; a bin begins at its edge.

    The last bin of real numbers holds its upper edge too. outside: whether there is a bin for what is below, and one
    for what is above; without, such values are in the first and the last bin.
    """

    of: Measured
    edges: tuple[float, ...]
    outside: bool = False

    @classmethod
    def between(cls, of: Measured, count: int, outside: bool = False) -> Bins:
        """At most so many bins of one width between the bounds. Raises QuestionError for too many, or no bounds."""
        low, high = of.bounds
        if count < 1:
            raise QuestionError(f"{count} bins; there is 1 at least")
        edges: tuple[float, ...]
        if of.whole:
            width = int(-(-(high - low + 1) // count))
            edges = (*range(int(low), int(high) + 1, width), int(high) + 1)
        else:
            inner = (low + (high - low) * place / count for place in range(1, count))
            edges = (low, *(float(f"{edge:.9g}") for edge in inner), high)
            if len(set(torch.tensor(edges, dtype=torch.float32).tolist())) < len(edges):
                raise QuestionError(f"{low:g} to {high:g} is too narrow for {count:,} bins of {of.field.name}")
        made = cls(of, edges, outside)
        if made.count * of.elements > LARGEST_STEP:
            raise QuestionError(
                f"{made.count:,} groups of {of.elements:,} elements of {of.field.name}; the product may be "
                f"{LARGEST_STEP:,}"
            )
        return made

    @property
    def inner(self) -> int:
        """The bins between the edges."""
        return len(self.edges) - 1

    @property
    def count(self) -> int:
        """G, all bins."""
        return self.inner + 2 * self.outside

    @property
    def single(self) -> bool:
        """Whether each bin holds one value."""
        return self.of.whole and self.edges[-1] - self.edges[0] == self.inner

    @property
    def ends(self) -> tuple[tuple[float | None, float | None], ...]:
        """Where each bin begins and ends: real numbers below the end, whole ones to it; None is without an end."""
        less = 1 if self.of.whole else 0
        inner = tuple((low, high - less) for low, high in zip(self.edges[:-1], self.edges[1:], strict=True))
        below, above = (None, self.edges[0] - less), (self.edges[-1], None)
        return (below, *inner, above) if self.outside else inner

    def counts(self, fields: Fields, within: Callable[[Tensor, Tensor], Tensor] = torch.eq) -> Tensor:
        """How many values of each row are in each bin, (B, G). within: compares a bin with a value's."""
        values, valid = self.of.numbers(fields)
        edges = torch.tensor(self.edges, dtype=values.dtype)
        place = (values[..., None] >= edges[:-1]).sum(-1) + (
            values >= edges[-1] if self.of.whole else values > edges[-1]
        ).long()
        if not self.outside:
            place = place.clamp(1, self.inner) - 1
        found = within(torch.arange(self.count), place[..., None])
        return torch.logical_and(found, valid[..., None]).to(torch.float32).sum(1)
