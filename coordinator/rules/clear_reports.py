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
from fedcore.params import FLOAT_BYTES
from fedcore.report import WEIGHT, ReportLayout

ESTIMATORS = ("mean", "trimmed-mean", "median", "krum")
MOST_KEPT, MOST_KEPT_BYTES = 500, 1 << 28
"""Reports of a round that are kept one by one, and their memory: the driver looks at all of them when it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearReports:
    """The bounds on a report of a task without secure aggregation, and the estimate that is made of all of them.

    max_norm: the L2 norm to which a longer mean segment is scaled down. max_weight: the weight that a report with a
    greater one counts with. No honest device is expected to meet the defaults.

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

    def bound(self, report_L: NDArray[np.floating[Any]], layout: ReportLayout) -> NDArray[np.floating[Any]]:
        """A report (L,) within the bounds: the same array when it is, else a copy that is scaled down.

        A weight that is too great scales the whole report, so that means and metrics count as those of the lower one.
        """
        slices = layout.slices()
        weight = next(float(report_L[where][0]) for segment, where in slices if segment.name == WEIGHT)
        heavy = weight > self.max_weight
        longest = self.max_norm * weight
        norms = [(where, _norm(report_L[where])) for segment, where in slices if segment.reduction == "mean"]
        long = [(where, norm) for where, norm in norms if norm > longest]
        if not heavy and not long:
            return report_L
        bounded_L = report_L.astype(np.float64)
        for where, norm in long:
            bounded_L[where] *= longest / norm
        if heavy:
            bounded_L *= self.max_weight / weight
        return bounded_L


def _norm(values: NDArray[np.floating[Any]]) -> float:
    """The L2 norm; in the values' own precision, as long as their squares neither overflow nor vanish in it."""
    with np.errstate(over="ignore", under="ignore"):
        square = float(values @ values)
    precision = np.finfo(values.dtype)
    # What vanishes is at most the smallest normal number for each value: below this it could be part of the norm.
    least = values.size * float(precision.tiny) / float(precision.eps)
    return math.sqrt(square) if least <= square < math.inf else float(np.linalg.norm(values.astype(np.float64)))
