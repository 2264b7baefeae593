"""Reports in clear: the bounds on each of them, so that no single device decides the next model. Pure.

Legend: L values of a report. Spec: docs/spec/rounds.md §8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.errors import InvalidTask
from coordinator.rules.eligibility import demand
from fedcore import codecs
from fedcore.codecs.codec import RoundKey
from fedcore.params import FLOAT_BYTES
from fedcore.report import WEIGHT, ReportLayout, Segment

ESTIMATORS = ("mean", "trimmed-mean", "median", "krum")
SLACK = 2.0
"""How many times as long as it is on average an honest update may be decoded: what travels of it is drawn by lot."""
MOST_KEPT, MOST_KEPT_BYTES = 500, 1 << 28
"""Reports of a round that are kept one by one, and their memory: the driver looks at all of them when it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearReports:
    """The bounds on a report of a task without secure aggregation, and the estimate that is made of all of them.

    max_norm: the L2 norm to which a longer mean segment is scaled down; of one with codecs, what it is decoded to is
    held to `longest`. max_weight: the weight that a report with a greater one counts with. No honest device is expected
    to meet the defaults.

    estimator: one of ESTIMATORS; all but the mean keep every report in memory until the round ends. tolerate: how many
    false reports a trimmed mean or Krum expects.

    Raises InvalidTask naming the setting and what it may be.
    """

    max_norm: float = 1000.0
    max_weight: float = 10_000.0
    estimator: str = "mean"
    tolerate: int = 0

    def __post_init__(self) -> None:
        demand(1e-6 <= self.max_norm <= 1e6, "max_norm", "from 1e-6 to 1e6", self.max_norm)
        demand(1 <= self.max_weight <= 2**31, "max_weight", "from 1 to 2**31", self.max_weight)
        demand(self.estimator in ESTIMATORS, "estimator", f"one of {', '.join(ESTIMATORS)}", self.estimator)
        counts = self.estimator in ("trimmed-mean", "krum")
        wording = f"at least 1 with {self.estimator}" if counts else f"0 with {self.estimator}"
        demand(self.tolerate >= 1 if counts else self.tolerate == 0, "tolerate", wording, self.tolerate)

    @property
    def least_reports(self) -> int:
        """So many reports a round must have for the estimate to exist."""
        return {"trimmed-mean": 2 * self.tolerate + 1, "krum": 2 * self.tolerate + 3}.get(self.estimator, 1)

    def check_room(self, layout: ReportLayout, goal: int) -> None:
        """Raise InvalidTask when the reports of a round are more than may be kept one by one."""
        most = min(MOST_KEPT, MOST_KEPT_BYTES // (layout.size * FLOAT_BYTES))
        if self.estimator != "mean" and goal > most:
            raise InvalidTask(
                f"estimator {self.estimator} keeps every report of a round, and of {layout.size:,} values it may keep "
                f"{most}: lower the goal from {goal} to that, take a smaller model, or the mean"
            )

    def bound(
        self, report_L: NDArray[np.floating[Any]], layout: ReportLayout, key: RoundKey
    ) -> NDArray[np.floating[Any]]:
        """A report (L,) within the bounds: the same array when it is, else a copy that is scaled down.

        A weight that is too great scales the whole report, so that means and metrics count as those of the lower one.
        key: of the codecs of the report's round.
        """
        slices = layout.slices()
        weight = next(float(report_L[where][0]) for segment, where in slices if segment.name == WEIGHT)
        heavy = weight > self.max_weight
        factors = [
            (where, self._factor(segment, report_L[where], weight, key, index))
            for index, (segment, where) in enumerate(slices)
            if segment.reduction == "mean"
        ]
        long = [(where, factor) for where, factor in factors if factor < 1]
        if not heavy and not long:
            return report_L
        bounded_L = report_L.astype(np.float64)
        for where, factor in long:
            bounded_L[where] *= factor
        if heavy:
            bounded_L *= self.max_weight / weight
        return bounded_L

    def _factor(
        self, segment: Segment, values_C: NDArray[np.floating[Any]], weight: float, key: RoundKey, index: int
    ) -> float:
        """What brings a mean segment within the bounds; 1 when it is. index: its place in the layout."""
        most, stretch = self.max_norm * weight, codecs.stretch(segment.codecs)
        norms = [(_norm(values_C), most if stretch == 1 else SLACK * stretch * most)]
        if not codecs.keep_norms(segment.codecs):
            # In float64, in which what is made of finite float32 overflows nowhere.
            decoded = codecs.decoded_norm(segment.codecs, values_C.astype(np.float64), segment.size, key, index)
            norms.append((decoded, longest(segment, most)))
        return min([1.0, *(most / norm for norm, most in norms if norm > most)])


def longest(segment: Segment, norm: float) -> float:
    """The L2 norm to which a decoded mean segment is held where an update that is `norm` long must pass.

    Codecs send a part of an update and make the rest up: decoded it is √growth times as long on average. What is made
    for that, as a false report may be, is growth times as long.
    """
    if codecs.keep_norms(segment.codecs):
        return norm
    growth = codecs.growth(segment.codecs, segment.size)
    return norm * min(growth, SLACK * math.sqrt(growth))


def _norm(values: NDArray[np.floating[Any]]) -> float:
    """The L2 norm; in the values' own precision, as long as their squares neither overflow nor vanish in it."""
    with np.errstate(over="ignore", under="ignore"):
        square = float(values @ values)
    precision = np.finfo(values.dtype)
    # What vanishes is at most the smallest normal number for each value: below this it could be part of the norm.
    least = values.size * float(precision.tiny) / float(precision.eps)
    return math.sqrt(square) if least <= square < math.inf else float(np.linalg.norm(values.astype(np.float64)))
