"""The answer that a task's model holds, whichever algorithm asked; and an answer as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedcore.algorithms import create
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.heavy_hitters import HeavyHitters
from fedcore.algorithms.question import Ask
from fedcore.bundle import AlgorithmRef
from fedcore.errors import QuestionError
from fedcore.params import Float32
from fedcore.questions.answer import Answer, answer
from fedcore.questions.found import answer_found
from fedcore.visible import visible

_FORMULA = ("=", "+", "-", "@")


def answer_of(
    algorithm: AlgorithmRef, tensors: Mapping[str, Any], noise_multiplier: float = 0.0, rounds: int = 1
) -> Answer:
    """The answer in a model, by the names of its tensors.

    noise_multiplier: of the sum of all rounds, of which there are so many: its noise over the clip. Raises
    QuestionError for an algorithm that asks nothing, and for the model of another question.
    """
    made = create(algorithm.name, algorithm.settings)
    asking, clip = (made.inner, made.clipping.clip_norm) if isinstance(made, Clipped) else (made, 0.0)
    noise = noise_multiplier * clip
    if isinstance(asking, HeavyHitters):  # no count is of two rounds
        return answer_found(asking, _flat(tensors, asking.tree.shapes), noise / math.sqrt(rounds))
    if isinstance(asking, Ask):
        return answer(asking.asked, _flat(tensors, ("high", "low")), noise)
    raise QuestionError(f"{algorithm.name} trains or evaluates a model, and asks no question")


def _flat(tensors: Mapping[str, Any], names: Iterable[str]) -> Float32:
    """The tensors with these names as one vector."""
    try:
        return np.concatenate([np.ravel(tensors[name]) for name in names])
    except KeyError as error:
        raise QuestionError("the model is not one of this question") from error


def as_csv(columns: Sequence[str], rows: Sequence[Sequence[object]], errors: Sequence[Sequence[object]] | None) -> str:
    """A table as CSV. A column that noise moves is followed by one with its errors; NULL is an empty field.

    Text that a spreadsheet would take for a formula begins with an apostrophe: names of groups may be strangers'.
    """
    noisy = {place for row in errors or () for place, error in enumerate(row) if error is not None}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([part for place, name in enumerate(columns) for part in _with(name, f"{name} ±", place in noisy)])
    for number, row in enumerate(rows):
        beside = errors[number] if errors else (None,) * len(row)
        pairs = enumerate(zip(row, beside, strict=True))
        writer.writerow([part for place, (value, error) in pairs for part in _with(value, error, place in noisy)])
    return text.getvalue()


def _with(value: object, other: object, both: bool) -> list[object]:
    return [_field(value), _field(other)] if both else [_field(value)]


def _field(value: object) -> object:
    if isinstance(value, tuple | list):
        return " ".join(str(_field(one)) for one in value)
    if isinstance(value, str):
        shown = visible(value)
        return f"'{shown}" if shown.startswith(_FORMULA) else shown
    return value
