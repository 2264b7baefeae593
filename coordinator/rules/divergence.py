"""Divergence of a task: a loss that is not finite, or stays far above that of its first round. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

DIVERGED = "diverged"
"""The cause of the pause in a task's history, and the first word of its reason."""
IN_A_ROW = 3
"""Rounds in a row with too large a loss: a single one may have had odd devices, or a device that lies."""
MOST_ROUNDS = 2 * IN_A_ROW
"""Rounds to look at: with two trips, every other round has a loss of the same name."""
_LOSS = ".loss"
Metrics: TypeAlias = Mapping[str, float]


def divergence(first: Metrics, latest: Sequence[Metrics], most_growth: float) -> str:
    """Why a task counts as diverged, in words for its operator; "" while it does not.

    first: the first value of each metric. latest: metrics of the last rounds since the task was made active, the newest
    last; MOST_ROUNDS are enough. most_growth: how many times its first value a loss may be; 0 looks at no loss.
    """
    if not most_growth:
        return ""
    for name in sorted(one for metrics in latest for one in metrics if one.endswith(_LOSS)):
        values = [metrics[name] for metrics in latest if name in metrics]
        if not math.isfinite(values[-1]):
            return f"{name} is {values[-1]}"
        most = most_growth * abs(first.get(name, 0.0))
        if most and len(values) >= IN_A_ROW and min(values[-IN_A_ROW:]) > most:
            return f"{name} was above {most:.4g}, {most_growth:g} times its first value, in {IN_A_ROW} rounds in a row"
    return ""
