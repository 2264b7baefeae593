"""Six activities of 28 phone users from ten-second accelerometer windows (WISDM Lab, Kwapisz, Weiss, Moore 2010)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.datasets.files import read_npz
from simulator.population import Population


def wisdm(data: Path) -> Population:
    """One client per user. `x` float32 (43,) standardised, `y` int64 below 6.

    Features are scaled by the mean and deviation of all users, and a missing peak becomes the mean. A deployment would
    ship such constants with the plan.
    """
    arrays = read_npz(data / "wisdm" / "wisdm_ar_v1.1.npz", ["x", "y", "user"])
    raw = arrays["x"].astype(np.float64)
    mean, deviation = np.nanmean(raw, 0), np.nanstd(raw, 0)
    deviation[deviation == 0] = 1  # XAVG is constant
    x = np.nan_to_num((raw - mean) / deviation).astype(np.float32)
    y, users = arrays["y"].astype(np.int64), arrays["user"]
    names = np.unique(users)
    return Population.of(
        [f"wisdm-{name}" for name in names], [{"x": x[users == name], "y": y[users == name]} for name in names]
    )
