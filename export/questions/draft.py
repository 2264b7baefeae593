"""A question in the making: numbers of a row with the blocks that are made of them, and what of a device counts.

Norms, of a device of m rows at most. Numbers from 0 of which a row adds `each` in all: their sum is m · each at most,
and no L2 norm is more than the sum; all in one group reach it. G numbers that are c at most: √G c. Ones and zeros,
where k rows or elements of rows can each make a one: √min(G, k).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from export.questions.asked import Asked
from export.questions.measured import Fields
from fedcore.errors import QuestionError
from fedcore.plan import Field
from fedcore.questions.question import WORD, Block, Call, Cell, Column, Key, Number, Question, Rows, Value

RowNumbers: TypeAlias = Callable[[Fields], Tensor]
"""Fields of B rows to (B, size) float32."""
VOTERS = "voters"
COUNTED = 2**20 - 1
"""The largest whole number that secure rounds carry exactly in one."""
_MOST_ROWS = re.compile(r"\s+MAX\s+(\d{1,12})\s+ROWS?\s+PER\s+DEVICE\s*$", re.IGNORECASE)


def without_rows_clause(words: Sequence[str]) -> tuple[list[str], int | None]:
    """The words of a question without `MAX n ROWS PER DEVICE` at the end, and n; None where all rows count."""
    text = " ".join(words)
    clause = _MOST_ROWS.search(text)
    return (text[: clause.start()] if clause else text).split(), int(clause[1]) if clause else None


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
    ) -> Asked:
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
        return Asked(question, tuple(fields), lambda given: torch.cat([number(given) for number in numbers], 1))

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
