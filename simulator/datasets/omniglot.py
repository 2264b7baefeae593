"""Handwritten characters of five alphabets by 100 writers: a part of Omniglot (Lake, Salakhutdinov, Tenenbaum 2015)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.columns import int64_of
from simulator.datasets.files import read_npz
from simulator.population import Population


def omniglot(data: Path) -> Population:
    """One client per writer. `x` float32 (1, 28, 28), 1 is ink; `y` int64, the character; `coarse`, its alphabet.

    A writer draws every character of one alphabet once, so held-out writers' characters are known, their hand is not.
    """
    arrays = read_npz(data / "omniglot" / "omniglot_writers_28.npz", ["x", "y", "writer", "alphabet"])
    x = arrays["x"].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    y, writers = int64_of(arrays["y"], "omniglot: field 'y'"), arrays["writer"]
    _, coarse = np.unique(arrays["alphabet"], return_inverse=True)
    names = np.unique(writers)
    shards = [{"x": x[of], "y": y[of], "coarse": coarse[of]} for of in (writers == name for name in names)]
    return Population.of([f"writer-{name:03d}" for name in names], shards)
