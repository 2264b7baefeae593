"""The values that heavy hitters found, from the model of their task: after any round, as far as there are some."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedcore.algorithms.heavy_hitters import HeavyHitters
from fedcore.errors import QuestionError
from fedcore.params import Float32
from fedcore.questions.answer import TIMES, Answer
from fedcore.questions.prefix_tree import ANSWERED, DEVICES, OUT_OF, WORDS

COLUMNS = "value", "devices", "share"


class FoundValue(NamedTuple):
    """A found value: a word, or a whole number. devices: that voted for it in the round that found it, of `out_of`."""

    value: bytes | int
    devices: int
    out_of: int

    @property
    def share(self) -> float:
        """Of the devices of that round."""
        return self.devices / self.out_of


def found(algorithm: HeavyHitters, params_D: Float32) -> list[FoundValue]:
    """The values that were found so far, most devices first. Raises QuestionError for parameters of another tree."""
    tree, places = algorithm.tree, algorithm.tree.places
    if params_D.shape != (places[OUT_OF].stop,):
        raise QuestionError(f"a tree of this size has {places[OUT_OF].stop:,} numbers, not {params_D.size:,}")
    digits = np.stack([params_D[where] for where in tree.columns(WORDS)], 1).astype(int).tolist()
    devices, out_of = (params_D[places[name]].tolist() for name in (DEVICES, OUT_OF))
    values = [
        FoundValue(tree.value(one), round(number), round(of))
        for one, number, of in zip(digits, devices, out_of, strict=True)
        if number > 0
    ]
    return sorted(values, key=lambda one: -one.devices)


def answer_found(algorithm: HeavyHitters, params_D: Float32, deviation: float = 0.0) -> Answer:
    """The same as a table: value, devices, share. deviation: of the noise in the sums of one round.

    Words are text; bytes that are no UTF-8 are escaped. Raises QuestionError as `found`.
    """
    values = found(algorithm, params_D)
    answered = round(float(params_D[algorithm.tree.places[ANSWERED]][0]))
    errors = tuple((None, TIMES * deviation, TIMES * deviation / one.out_of) for one in values)
    rows = tuple((_shown(one.value), one.devices, one.share) for one in values)
    return Answer(COLUMNS, rows, answered, 0, errors if deviation else None)


def _shown(value: bytes | int) -> str | int:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
