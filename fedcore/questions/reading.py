"""The answer in the model of a task that asks, by the algorithm of the task, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.question import Ask
from fedcore.errors import QuestionError
from fedcore.params import Float32
from fedcore.questions.answer import Answer, answer
from fedcore.visible import visible

_FORMULA = ("=", "+", "-", "@")


def asked_by(algorithm: Algorithm) -> Ask:
    """The algorithm that asks, without its clipping. Raises QuestionError for one that asks no question."""
    asking = algorithm.inner if isinstance(algorithm, Clipped) else algorithm
    if not isinstance(asking, Ask):
        raise QuestionError(f"{algorithm.name} asks no question whose answer can be read")
    return asking


def read(algorithm: Algorithm, params_D: Float32, deviation: float = 0.0) -> Answer:
    """The answer in the parameters of a task that asks. deviation: as of `answer`, whose errors it raises."""
    return answer(asked_by(algorithm).asked, params_D, deviation)


def as_csv(columns: Sequence[str], rows: Sequence[Sequence[object]], errors: Sequence[Sequence[object]] | None) -> str:
    """A table as CSV (RFC 4180). A column that noise moves is followed by one with its error; NULL is an empty field.

    Text that a spreadsheet would take for a formula begins with an apostrophe: names of groups may be strangers'.
    """
    noisy = {place for row in errors or () for place, error in enumerate(row) if error is not None}
    text = io.StringIO()
    writer = csv.writer(text)
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
