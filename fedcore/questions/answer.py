"""The answer to a question: the table that is read from the model of its task, and how far noise may move it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcore.errors import QuestionError
from fedcore.params import Float32
from fedcore.questions.functions import FUNCTIONS
from fedcore.questions.question import WORD, Call, Cell, Group, Literals, Number, Question, Shown, Value, words_of

if TYPE_CHECKING:
    import pandas as pd

Float64 = NDArray[np.float64]
DRAWS, TIMES = 400, 2.1
"""An interval of 95 % and a little more is so many deviations of a normal distribution. That of what is computed from
sums is estimated from draws of the noise: 400 give it to some 4 %."""


class Answer(NamedTuple):
    """An answer. rows: of the table, by column. devices: that answered. hidden: groups with fewer devices than may be
    shown, or none: which of both is not said. errors: how far noise moves each number with 95 %, None for what it does
    not move; without noise no errors.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Literals, ...], ...]
    devices: int
    hidden: int
    errors: tuple[tuple[float | None, ...], ...] | None = None

    def dataframe(self) -> pd.DataFrame:
        """The table in pandas, with a column of errors beside each that has some."""
        import pandas as pd

        frame = pd.DataFrame([list(row) for row in self.rows], columns=list(self.columns))
        for column, name in enumerate(self.columns if self.errors else ()):
            errors = [row[column] for row in self.errors or ()]
            if any(error is not None for error in errors):
                frame[f"{name} ±"] = errors
        return frame

    def _repr_html_(self) -> str:
        from fedcore.notebook import table_of  # devices show no tables

        return table_of(self.columns, self.rows)


class _Sums(NamedTuple):
    """The sums over devices of every block, (G, width) each, or (1, width) of one for all groups.

    whole: which blocks are of whole numbers. shown: the groups that are shown.
    """

    blocks: Mapping[str, Float64]
    whole: frozenset[str]
    shown: tuple[int, ...] = ()

    def cell(self, block: str, group: int) -> Any:
        """What a column reads of a block in a group: a number, or several."""
        blocks = self.blocks[block]
        numbers = blocks[group if len(blocks) > 1 else 0].tolist()
        if block in self.whole:
            numbers = [round(number) for number in numbers]
        return numbers[0] if len(numbers) == 1 else tuple(numbers)


def answer(question: Question, params_D: Float32, deviation: float = 0.0) -> Answer:
    """The answer in the parameters of a question's task.

    deviation: the standard deviation of the noise in each of the summed numbers, before blocks are multiplied by their
    norms again. Raises QuestionError for parameters of another question.
    """
    devices, sums = _sums_of(question, params_D)
    voters = np.broadcast_to(sums.blocks[question.voters][:, 0], question.groups)
    shown = [group for group, count in enumerate(voters.tolist()) if round(count) >= question.minimum_devices]
    sums = sums._replace(shown=tuple(shown))
    hidden = question.groups - len(shown) if question.minimum_devices > 1 else 0
    rows = [tuple(_value(column.value, question, sums, group) for column in question.columns) for group in shown]
    errors = _errors(question, sums, shown, rows, deviation) if deviation else [()] * len(rows)
    kept = _in_order(question, rows)
    return Answer(
        tuple(column.name for column in question.columns),
        tuple(rows[index] for index in kept),
        devices,
        hidden,
        tuple(errors[index] for index in kept) if deviation else None,
    )


def _sums_of(question: Question, params_D: Float32) -> tuple[int, _Sums]:
    half = 1 + sum(question.block_sizes.values())
    if params_D.shape != (2 * half,):
        raise QuestionError(f"an answer to this question has {2 * half:,} numbers, not {params_D.size:,}")
    both = params_D.astype(np.float64)
    total, start = both[:half] + both[half:], 1
    vectors: dict[str, Float64] = {}
    for name, size in question.block_sizes.items():
        vectors[name] = total[start : start + size]
        start += size
    blocks = {}
    for block in question.blocks:
        names = question.vectors(block)
        if len(names) == 2:
            low, high = (vectors[name].round() for name in words_of(block.name))
            vectors[block.name] = low + WORD * high
        blocks[block.name] = vectors[block.name].reshape(question.groups_of(block), -1)
    return round(float(total[0])), _Sums(blocks, frozenset(block.name for block in question.blocks if block.whole))


def _value(value: Value, question: Question, sums: _Sums, group: int) -> Any:
    """What an expression is in a group."""
    match value:
        case Number(constant):
            return constant
        case Cell(block):
            return sums.cell(block, group)
        case Shown(block):
            return tuple(sums.cell(block, one) for one in sums.shown)
        case Group(key):
            return question.keys[key].values[_place(question, group, key)]
        case Call(name, arguments):
            values = [_value(argument, question, sums, group) for argument in arguments]
            try:
                return FUNCTIONS[name](*values)
            except (TypeError, ValueError, ArithmeticError, LookupError) as error:
                raise QuestionError(f"{name} of {values!r:.80} cannot be computed: {error}") from error


def _place(question: Question, group: int, key: int) -> int:
    """The place of a group's value among those of a key; the last key is the fastest."""
    later = math.prod(len(one.values) for one in question.keys[key + 1 :])
    return group // later % len(question.keys[key].values)


def _in_order(question: Question, rows: Sequence[Sequence[Any]]) -> list[int]:
    """The rows of the table, by their places: sorted and cut off as was asked. NULL comes first, as in SQLite."""
    kept = list(range(len(rows)))
    for order in reversed(question.order):
        column = order.column
        kept.sort(key=lambda index: _sorted_by(rows[index][column]), reverse=order.descending)
    return kept[: question.limit]


def _sorted_by(value: Any) -> tuple[int, Any]:
    """NULL, then numbers, then text."""
    return (0, 0) if value is None else (2, value) if isinstance(value, str) else (1, value)


def _errors(
    question: Question, sums: _Sums, shown: Sequence[int], rows: Sequence[Sequence[Any]], deviation: float
) -> list[tuple[float | None, ...]]:
    """How far noise moves each number of the shown rows with 95 %."""
    by_block = {block.name: deviation * (block.norm if question.private else 1.0) for block in question.blocks}
    source = np.random.default_rng(0)
    draws = [
        sums._replace(
            blocks={name: one + by_block[name] * source.standard_normal(one.shape) for name, one in sums.blocks.items()}
        )
        for _ in range(DRAWS if any(isinstance(column.value, Call) for column in question.columns) else 0)
    ]

    def error(value: Value, group: int, found: Any) -> float | None:
        if isinstance(value, Cell):
            return TIMES * by_block[value.block]
        if not isinstance(value, Call) or not isinstance(found, int | float):
            return None
        others = [_value(value, question, draw, group) for draw in draws]
        apart = [other - found for other in others if isinstance(other, int | float)]
        return TIMES * math.sqrt(sum(one * one for one in apart) / len(apart)) if apart else None

    return [
        tuple(error(column.value, group, found) for column, found in zip(question.columns, row, strict=True))
        for group, row in zip(shown, rows, strict=True)
    ]
