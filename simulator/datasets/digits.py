"""1,797 handwritten digits of 8×8 pixels, bundled with scikit-learn (UCI Optical Recognition of Handwritten Digits)."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulator.partition import dirichlet
from simulator.population import Array, Population


def digits(clients: int = 75, alpha: float = 0.3, seed: int = 0) -> Population:
    """Digits over clients by Dirichlet(alpha). `x` float32 (1, 8, 8) in 0 … 1, `y` int64."""
    pixels_and_class = _rows()
    x = (pixels_and_class[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    y = pixels_and_class[:, -1].astype(np.int64)
    shards: list[dict[str, Array]] = [{"x": x[rows], "y": y[rows]} for rows in dirichlet(y, clients, alpha, seed)]
    return Population.of([f"digits-{index:03d}" for index in range(clients)], shards)


def _rows() -> NDArray[np.float64]:
    """64 pixels in 0 … 16 and the class, (1797, 65). Read from scikit-learn's file: importing it takes a second."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the data set digits is part of scikit-learn, which is not installed", name="sklearn")
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        return np.loadtxt(file, delimiter=",")
