"""1,797 handwritten digits of 8×8 pixels: the test set of UCI's Optical Recognition of Handwritten Digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.partition import dirichlet
from simulator.population import Population


def digits(clients: int = 75, alpha: float = 0.3, seed: int = 0) -> Population:
    """Digits over clients by Dirichlet(alpha). `x` float32 (1, 8, 8) in 0 … 1, `y` int64."""
    with np.load(Path(__file__).with_name("digits.npz")) as source:
        x = (source["x"] / 16).astype(np.float32)[:, None]
        y = source["y"].astype(np.int64)
    shards = [{"x": x[rows], "y": y[rows]} for rows in dirichlet(y, clients, alpha, seed)]
    return Population.of([f"digits-{index:03d}" for index in range(clients)], shards)
