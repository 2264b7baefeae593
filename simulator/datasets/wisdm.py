"""Six activities of 28 phone users from ten-second accelerometer windows (WISDM Lab, Kwapisz, Weiss, Moore 2010)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.columns import int64_of
from simulator.datasets.files import read_npz
from simulator.population import Array, Population


def wisdm(data: Path) -> Population:
    """One client per user. `x` float32 (43,) standardised, `y` int64 below 6.

    Features are scaled by the mean and deviation of all users, and a missing peak becomes the mean. A deployment would
    ship such constants with the plan.
    """
    arrays = _arrays(data)
    raw = arrays["x"].astype(np.float64)
    mean, deviation = np.nanmean(raw, 0), np.nanstd(raw, 0)
    deviation[deviation == 0] = 1  # XAVG is constant
    return _by_user(arrays, np.nan_to_num((raw - mean) / deviation).astype(np.float32))


def raw_wisdm(data: Path) -> Population:
    """The same users with the features as phones compute them, float32 (43,), and a missing peak as 0.

    In order: 30 shares of a window's samples in ten bins of each axis, three means in m/s², three times between peaks
    in ms, three absolute and three standard deviations, and the mean length of the acceleration.
    """
    arrays = _arrays(data)
    return _by_user(arrays, np.nan_to_num(arrays["x"]).astype(np.float32))


def _arrays(data: Path) -> dict[str, Array]:
    return read_npz(data / "wisdm" / "wisdm_ar_v1.1.npz", ["x", "y", "user"])


def _by_user(arrays: dict[str, Array], x: Array) -> Population:
    y, users = int64_of(arrays["y"], "wisdm: field 'y'"), arrays["user"]
    names = np.unique(users)
    return Population.of(
        [f"wisdm-{name}" for name in names], [{"x": x[users == name], "y": y[users == name]} for name in names]
    )
