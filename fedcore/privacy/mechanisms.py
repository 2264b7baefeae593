"""Noise that is correlated over rounds, and the check that an algorithm's sums may have it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedcore.algorithms.algorithm import Algorithm, trips_of
from fedcore.algorithms.clipped import Clipped
from fedcore.errors import PrivacyError
from fedcore.privacy.accounting import coefficients, inverse_row
from fedcore.privacy.settings import Noise

Floats = NDArray[np.float64]


class NoiseOfRounds:
    """The noise w_1, w_2, … of rounds (fedcore/privacy/accounting.py), in units of z times the bound on a report.

    draw: draw(step) is ζ of a step from 1, (M,) of standard normal numbers; equal steps give equal numbers. A banded
    matrix keeps the noise of its last `bands` − 1 rounds. When asked for a step other than the next, it computes the
    noise of all rounds again.
    """

    def __init__(self, noise: Noise, draw: Callable[[int], Floats]) -> None:
        self._noise, self._draw = noise, draw
        self._taps = coefficients(noise.bands)[1:]
        self._last: deque[Floats] = deque(maxlen=noise.bands - 1)
        self._step = 0

    def at(self, step: int) -> Floats:
        """w of a step from 1, (M,)."""
        if self._noise.mechanism != "banded":
            row = inverse_row(self._noise.mechanism, self._noise.bands, step)
            summed: Floats = np.sum([weight * self._draw(earlier) for earlier, weight in row.items()], axis=0)
            return summed
        if step != self._step + 1:
            self._last.clear()
            self._step = 0
        while self._step < step:
            self._step += 1
            noise = self._draw(self._step)
            for tap, earlier in zip(self._taps, self._last, strict=False):
                noise = noise - tap * earlier
            self._last.appendleft(noise)
        return noise


def check_private(noise: Noise, algorithm: Algorithm) -> None:
    """Raise PrivacyError, saying what to change, unless the algorithm's sums may have the noise."""
    if not isinstance(algorithm, Clipped):
        raise PrivacyError(
            f"privacy needs reports that are clipped as a whole, and those of {algorithm.name} are not: set "
            "weighting=uniform and clip_norm"
        )
    if noise.mechanism == "gaussian":
        return
    if algorithm.clipping.clip_quantile:
        raise PrivacyError(
            f"with the mechanism {noise.mechanism} noise must have one size in all rounds: leave clip_quantile out, or "
            "take the mechanism gaussian"
        )
    if noise.mechanism == "distributed":
        return
    if len(trips_of(algorithm)) > 1:
        raise PrivacyError(
            f"with the mechanism {noise.mechanism} a round takes back noise of the rounds before it, and those of "
            f"{algorithm.name} sum other vectors: take the mechanism gaussian"
        )
