"""10,000 handwritten digits of 28×28 pixels, without users: partitioned over clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.datasets.files import read_npz
from simulator.partition import dirichlet
from simulator.population import Population


def mnist_10k(data: Path, clients: int = 125, alpha: float = 0.3, seed: int = 0) -> Population:
    """Digits over clients by Dirichlet(alpha). `x` float32 (1, 28, 28) in 0 … 1, `y` int64."""
    arrays = read_npz(data / "mnist_10k" / "mnist_10k.npz", ["x", "y"])
    x = arrays["x"].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    y = arrays["y"].astype(np.int64)
    shards = [{"x": x[rows], "y": y[rows]} for rows in dirichlet(y, clients, alpha, seed)]
    return Population.of([f"mnist-{index:03d}" for index in range(clients)], shards)
