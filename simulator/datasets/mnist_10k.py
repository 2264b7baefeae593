"""10,000 handwritten digits of 28×28 pixels, without users."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.columns import int64_of
from simulator.datasets.files import read_npz
from simulator.population import Population


def mnist_10k(data: Path) -> Population:
    """All digits, without users. `x` float32 (1, 28, 28) in 0 … 1, `y` int64."""
    arrays = read_npz(data / "mnist_10k" / "mnist_10k.npz", ["x", "y"])
    x = arrays["x"].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    return Population.of(["everybody"], [{"x": x, "y": int64_of(arrays["y"], "mnist_10k: field 'y'")}])
