"""Handwritten characters of five alphabets by 100 writers: a part of Omniglot (Lake, Salakhutdinov, Tenenbaum 2015)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.datasets.files import read_npz
from simulator.population import Population


def omniglot(data: Path) -> Population:
    """One client per writer. `x` float32 (1, 28, 28), 1 is ink; `y` int64, the character.

    A writer draws every character of one alphabet once, so held-out writers' characters are known, their hand is not.
    """
    arrays = read_npz(data / "omniglot" / "omniglot_writers_28.npz", ["x", "y", "writer"])
    x = arrays["x"].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    y, writers = arrays["y"].astype(np.int64), arrays["writer"]
    names = np.unique(writers)
    return Population.of(
        [f"writer-{name:03d}" for name in names],
        [{"x": x[writers == name], "y": y[writers == name]} for name in names],
    )
