"""Losses of devices as counts: how many devices have a loss of at least 1, of at least 1.5, of at least 2 …

Spec: docs/spec/plan.md §5.5. A mean of losses is moved anywhere by one false report. Here each device counts once, and
its report can move each count by 1.
"""

from __future__ import annotations

import numpy as np

from fedcore.params import Float32
from fedcore.ranges import Range
from fedcore.report import Segment

LOSSES = "losses"
_OCTAVES = range(-8, 24)
LEVELS = 2 * len(_OCTAVES)
"""Losses that are looked for, from 2^-8 to 1.5 · 2^23."""
LOSS_COUNTS = Segment(LOSSES, 2 * LEVELS, "sum", range=Range(0, 1, 1))
"""The segment: the counts before training, and those of training."""


def levels() -> Float32:
    """The losses (LEVELS,) that are looked for, ascending: 2^k and 1.5 · 2^k, which are exact."""
    return np.array([factor * 2.0**octave for octave in _OCTAVES for factor in (1, 1.5)], np.float32)


def count_losses(first_M: Float32, training_M: Float32) -> Float32:
    """The values (2 LEVELS,) of the segment: 1 for every level that a mean loss reaches, and 0.

    first_M: the metric sums of the first step of the first pass, which starts at the received model. training_M: those
    of the whole last pass. The first of each is the number of examples, the second the loss.
    """
    with np.errstate(all="ignore"):  # sums that are not finite reach no level, and the report is refused for them
        reached = [sums_M[1] / sums_M[0] >= levels() for sums_M in (first_M, training_M)]
    return np.concatenate(reached).astype(np.float32)
