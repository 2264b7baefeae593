"""1,797 handwritten digits of 8×8 pixels: the test set of UCI's Optical Recognition of Handwritten Digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.population import Population


def digits() -> Population:
    """All digits, without users. `x` float32 (1, 8, 8) in 0 … 1, `y` int64."""
    with np.load(Path(__file__).with_name("digits.npz")) as source:
        x = (source["x"] / 16).astype(np.float32)[:, None]
        y = source["y"].astype(np.int64)
    return Population.of(["everybody"], [{"x": x, "y": y}])
