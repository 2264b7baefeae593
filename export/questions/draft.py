"""A question in the making: fields as numbers that built-in questions use, with the blocks they go into.

Norms, of a device of m rows at most. Numbers from 0 of which a row adds `each` in all: their sum is m · each at most,
and no L2 norm is more than the sum; all in one group reach it. G numbers that are c at most: √G c. Ones and zeros,
where k rows or elements of rows can each make a one: √min(G, k).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from export.questions.asked import CompiledQuestion
from fedcore.errors import QuestionError
from fedcore.plan import Dtype, Field
from fedcore.questions.functions import TOLD
from fedcore.questions.question import WORD, Block, Call, Cell, Column, Key, Number, Question, Rows, Value
from fedcore.schedule import MOST_BITS
from fedcore.validation import offered

# Shapes: B rows, E elements of a field in a row, G groups.

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
        """The middle of the range, which float32 holds, so that numbers less it lose nothing; 0 without one."""
        if self.low is None or self.high is None:
            return 0.0
        return (self.low + self.high) // 2 if self.whole else _single((self.low + self.high) / 2)

    @property
    def half(self) -> float:
        """No value within the bounds is further from the middle; 1 without bounds."""
        if self.low is None or self.high is None:
            return 1.0
        if self.whole:
            return max(float(self.high - self.middle), 1.0)
        return max(_single(self.high) - self.middle, self.middle - _single(self.low)) or 1.0

    def numbers(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """The values (B, E), int64 or float32, those that are NULL as 0; and which are not NULL, (B, E)."""
        values = fields[self.field.name].reshape(-1, self.elements)
        values = values.long() if self.whole else values
        if self.full:
            return values, torch.ones_like(values, dtype=torch.bool)
        valid = values.ne(self.field.absent or 0) if self.whole else values.abs() <= LARGEST_FLOAT
        return torch.where(valid, values, torch.zeros_like(values)), valid

    @property
    def within(self) -> bool:
        """Whether no value is held to its bounds, as they are those of the field."""
        ends = {(each.low, each.high) for each in self.each or (self,)}
        return self.whole and self.field.high is not None and ends == {(0, self.field.high - 1)}

    def inside(self, fields: Fields) -> Tensor:
        """Which values, (B, E), are within the bounds, so that they themselves are added up, 1 or 0."""
        values, valid = self.numbers(fields)
        columns = [[each.low, each.high] for each in self.each or (self,)]
        low, high = torch.tensor(columns, dtype=values.dtype).T.contiguous()
        return torch.logical_and(valid, torch.logical_and(values >= low, values <= high)).to(torch.float32)

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


def _single(number: float) -> float:
    """The nearest number of float32."""
    return float(np.float32(number))


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


RowNumbers: TypeAlias = Callable[[Fields], Tensor]
"""Fields of B rows to (B, size) float32."""
VOTERS = "voters"
COUNTED = 2**20 - 1
"""The largest whole number that secure rounds carry exactly in one."""
_MOST_ROWS = re.compile(r"\s+MAX\s+(\d{1,12})\s+ROWS?\s+PER\s+DEVICE\s*$", re.IGNORECASE)


def taken_apart(words: Sequence[str], options: Sequence[str]) -> tuple[list[str], dict[str, str], int | None]:
    """The words of a question by name, its options KEY=VALUE, and n of `MAX n ROWS PER DEVICE` at the end.

    options: as they are offered, `key=` or a word alone. n is None where all rows count. Raises QuestionError.
    """
    text = " ".join(words)
    clause = _MOST_ROWS.search(text)
    parts = (text[: clause.start()] if clause else text).split()
    given = dict(part.split("=", 1) for part in parts if "=" in part)
    unknown = next((key for key in given if f"{key}=" not in options), None)
    if unknown is not None:
        raise QuestionError(f"there is no {unknown}=; {offered(unknown, options)}")
    return [part for part in parts if "=" not in part], given, int(clause[1]) if clause else None


@dataclass(frozen=True, slots=True)
class Terms:
    """What protects an answer.

    minimum_devices: the fewest in a group that is shown. most_rows: of a device that count, drawn at random; None for
    all. private: whether noise is to come. secure: whether single reports will be masked.
    """

    minimum_devices: int = 20
    most_rows: int | None = None
    private: bool = False
    secure: bool = False

    def __post_init__(self) -> None:
        if self.minimum_devices < 1 or (self.most_rows is not None and self.most_rows < 1):
            raise QuestionError("a shown group has 1 device or more, and 1 row of a device or more counts")

    @property
    def bounded(self) -> bool:
        """Whether what a device sends must be bounded."""
        return self.private or self.secure

    @property
    def hides(self) -> bool:
        """Whether numbers of too few devices are left out, which noise hides by itself."""
        return self.minimum_devices > 1 and not self.private

    @property
    def told(self) -> tuple[Number, ...]:
        """The least spread that is told, as a share of a sum of squares: under masks those of many rows are rounded."""
        share = (self.most_rows or 0) / 2**MOST_BITS if self.secure and not self.private else 0.0
        return (Number(share),) if share > TOLD else ()

    def need_rows(self) -> int:
        """The most rows of a device. Raises QuestionError where all count."""
        if self.most_rows is None:
            why = "noise (epsilon) hides" if self.private else "secure aggregation adds"
            raise QuestionError(f"{why} what is bounded: say how many rows of a device count: MAX n ROWS PER DEVICE")
        return self.most_rows


@dataclass(slots=True)
class Draft:
    """A question in the making. numbers: what each of `rows` is of, in their order."""

    terms: Terms
    rows: list[Rows] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    numbers: list[RowNumbers] = field(default_factory=list)

    def counts(
        self, name: str, size: int, number: RowNumbers, each: int, *, most: int | None = None, apart: bool = False
    ) -> Cell:
        """Whole numbers of a row from 0, which add up to `each` at most; their sum.

        most: what a device's sum is held to where all its rows count. apart: every number is `each` at most, whatever
        the others are.
        """
        terms = self.terms
        if terms.private and most is None:
            terms.need_rows()
        high = most if terms.most_rows is None or most is not None else terms.most_rows * each
        if not terms.private and (terms.secure or each > 1) and (high is None or high > COUNTED):
            self._add(Rows(name, size, words=True), lambda fields: _in_words(number(fields)))
        else:
            self._add(Rows(name, size), number)
        norm = high * math.sqrt(size if apart else 1) if terms.private and high is not None else 1.0
        self.blocks.append(Block(name, name, low=0, high=high, norm=norm))
        return Cell(name)

    def devices(self, name: str, size: int, number: RowNumbers, each: int) -> Cell:
        """The devices that have rows whose numbers, as of `counts`, are not 0."""
        rows = self._same(number, size) or self._add(Rows(f"of_{name}", size), number)
        most = size if self.terms.most_rows is None else min(size, self.terms.most_rows * each)
        norm = math.sqrt(most) if self.terms.private else 1.0
        self.blocks.append(Block(name, rows.name, "any", 0, 1, norm=norm))
        return Cell(name)

    def units(self, name: str, size: int, number: RowNumbers, each: int, *, low: int = -1) -> Cell:
        """Real numbers of a row within low … 1, `each` of them added up already; their sum."""
        terms, most = self.terms, None
        if terms.bounded or terms.most_rows is not None:
            most = terms.need_rows() * each
        self._add(Rows(name, size), number)
        norm = most * math.sqrt(size) if terms.private and most is not None else 1.0
        least = None if most is None else low * most
        self.blocks.append(Block(name, name, low=least, high=most, whole=False, norm=norm))
        return Cell(name)

    def bins(self, name: str, number: RowNumbers, edges: Sequence[float]) -> Cell:
        """How many devices have a sum of this number in each bin; one device is in one bin, a vector of norm 1."""
        rows = self._same(number, 1) or self._add(Rows(f"of_{name}"), number)
        self.blocks.append(Block(name, rows.name, "bins", 0, 1, edges=tuple(map(float, edges))))
        return Cell(name)

    def asked(
        self, text: str, fields: Sequence[Field], columns: Sequence[Column], keys: Sequence[Key], drawn: bool = True
    ) -> CompiledQuestion:
        """The question. drawn: whether only some rows of a device count. Raises QuestionError if it is too large."""
        terms, numbers = self.terms, tuple(self.numbers)
        most = terms.most_rows if drawn else None
        words = [text]
        if most is not None:
            words.append(f"Of each device {most:,} examples count at most, drawn at random.")
        if terms.minimum_devices > 1:
            words.append(f"What fewer than {terms.minimum_devices:,} devices have is not shown.")
        question = Question(
            text=" ".join(words),
            rows=tuple(self.rows),
            blocks=tuple(self.blocks),
            columns=tuple(columns),
            voters=VOTERS,
            keys=tuple(keys),
            minimum_devices=terms.minimum_devices,
            most_rows=most,
            private=terms.private,
        )
        return CompiledQuestion(
            question, tuple(fields), lambda given: torch.cat([number(given) for number in numbers], 1)
        )

    def _same(self, number: RowNumbers, size: int) -> Rows | None:
        """Rows of the same number, if they are not words."""
        pairs = zip(self.rows, self.numbers, strict=True)
        return next((rows for rows, one in pairs if one is number and rows.size == size and not rows.words), None)

    def _add(self, rows: Rows, number: RowNumbers) -> Rows:
        self.rows.append(rows)
        self.numbers.append(number)
        return rows


def among(least: int, found: Value, counts: Value, share: Value, sides: Sequence[Value]) -> Call:
    """A quantile where at least so many devices have a value up to its bin, and from it on.

    sides: the numbers of these devices, by bin, each.
    """
    devices = [Call("coalesce", (Call("least_with_share", (counts, share, side)), Number(0))) for side in sides]
    return Call("if_each", (found, Number(least), *devices))


def _in_words(numbers: Tensor) -> Tensor:
    """The low and the high word of whole numbers from 0."""
    high = torch.floor_divide(numbers, WORD)
    return torch.cat([numbers - WORD * high, high], 1)
