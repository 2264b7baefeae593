"""Divergence of a task: a loss that is not finite, or stays far above its first values. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcore.loss_counts import LEVELS, levels

DIVERGED = "diverged"
"""The cause of the pause in a task's history, and the first word of its reason."""
IN_A_ROW = 3
"""Rounds in a row with too large a loss: a single one may have had odd devices, or a device that lies."""
MOST_ROUNDS = 2 * IN_A_ROW
"""Rounds to look at: with two trips, every other round has a loss of the same name."""
FIRST_VALUES = 2 * IN_A_ROW - 1
"""Values of a loss whose median it is measured by: IN_A_ROW false ones move the median, fewer do not."""
FIRST_ROUNDS = 2 * FIRST_VALUES
"""Rounds that have them, with two trips."""
START = "start.loss"
"""The metric of a task's first round that says how large losses were before training."""
LIARS = 2
"""Devices of a round that may lie about their losses and pause nothing."""
_LOSS = ".loss"
Metrics: TypeAlias = Mapping[str, float]


def divergence(first: Sequence[Metrics], latest: Sequence[Metrics], most_growth: float) -> str:
    """Why a task counts as diverged, in words for its operator; "" while it does not.

    Both since the task was last made active. first: metrics of its first rounds, FIRST_ROUNDS at most. latest: those of
    its last rounds, the newest last; MOST_ROUNDS are enough. most_growth: how many times the median of its first
    FIRST_VALUES values a loss may be; 0 looks at no loss.
    """
    if not most_growth:
        return ""
    for name in sorted(name for metrics in latest for name in metrics if name.endswith(_LOSS)):
        values = [metrics[name] for metrics in latest if name in metrics]
        if not math.isfinite(values[-1]):
            return f"{name} is {values[-1]}"
        measures = [abs(metrics[name]) for metrics in first if name in metrics][:FIRST_VALUES]
        if len(measures) < FIRST_VALUES or len(values) < IN_A_ROW:
            continue
        most = most_growth * statistics.median(measures)
        if most and min(values[-IN_A_ROW:]) > most:
            times = f"{most_growth:g} times the median of its first {FIRST_VALUES} values"
            return f"{name} was above {most:.4g}, {times}, in {IN_A_ROW} rounds in a row"
    return ""


class LossCounts(NamedTuple):
    """How many of a round's devices reached each level of loss (2 LEVELS,): before training, and in training."""

    reached: NDArray[np.float64]
    devices: int

    def start(self) -> dict[str, float]:
        """The least level that the losses of at most LIARS devices reached before training, as a metric.

        Empty where too few devices reported, or where losses reach all levels.
        """
        above = levels()[self.reached[:LEVELS] <= LIARS]
        return {START: float(above[0])} if above.size and self.devices > 2 * LIARS else {}

    def explosion(self, start: float | None, most_growth: float) -> str:
        """Why training exploded in this round, in words; "" if it did not, or if the loss before it is not known.

        start: START of the task's first round. It exploded where the losses of LIARS devices more than half of all are
        `most_growth` times as large.
        """
        if start is None or not most_growth:
            return ""
        large = np.flatnonzero(levels() >= most_growth * start)
        if not large.size or self.reached[LEVELS + large[0]] <= self.devices / 2 + LIARS:
            return ""
        count, level = round(self.reached[LEVELS + large[0]]), float(levels()[large[0]])
        return f"{count} of {self.devices} devices had a loss of {level:g} or more, after less than {start:g} at first"
