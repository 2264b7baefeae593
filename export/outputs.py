"""The distance between the outputs of two models, in NumPy alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[np.generic]]
SIZES = (17, 3, 1)
"""The batches on which models are compared, where they take any."""
ALIKE = 1e-5
"""The largest distance of two models that are meant to be the same."""
TINY = 1e-30


def apart(actual: Arrays, expected: Arrays) -> float:
    """The worst relative l2 difference of any output; infinite where values that are not finite differ."""
    worst = 0.0
    for name, values in expected.items():
        wanted, ours = values.astype(np.float64), actual[name].astype(np.float64)
        finite = np.isfinite(wanted)
        if not np.array_equal(ours[~finite], wanted[~finite], equal_nan=True):
            return np.inf
        distance = float(np.linalg.norm((ours - wanted)[finite])) / max(float(np.linalg.norm(wanted[finite])), TINY)
        if not distance <= worst:  # also where it is not a number
            worst = distance
    return worst
