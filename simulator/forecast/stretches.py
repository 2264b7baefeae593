"""Stretches of time in which devices can come, on most nights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

DAY_S = 86_400.0

Rows = NDArray[np.int64]
Times = NDArray[np.float64]


class Stretches(Protocol):
    """When each of N devices can come."""

    def can_until(self, rows: Rows, now: float) -> Times:
        """The end of the stretch in which each of `rows` can come now; 0 where it cannot."""

    def next_stretch(self, rows: Rows, now: float) -> Times:
        """The start of the next stretch of each of `rows`, after now."""

    def longest_s(self) -> Times:
        """The longest stretch of each device (N,), in seconds."""


@dataclass(frozen=True, slots=True)
class Nightly:
    """A stretch on most days, at the same time of the day.

    begins_s: its start (N,), in seconds of a UTC day; lasts_s: its length (N,). chance: that there is one on a day.
    """

    begins_s: NDArray[np.float32]
    lasts_s: NDArray[np.float32]
    chance: float
    seed: int

    def can_until(self, rows: Rows, now: float) -> Times:
        """The end of the stretch in which each of `rows` can come now; 0 where it cannot."""
        day, into = self._last(rows, now)
        inside = (into < self.lasts_s[rows]) & self._is_there(rows, day)
        return np.where(inside, now - into + self.lasts_s[rows], 0.0)

    def next_stretch(self, rows: Rows, now: float) -> Times:
        """The start of the next stretch of each of `rows`, after now."""
        day, into = self._last(rows, now)
        start = now - into
        left = np.arange(len(rows))
        while len(left):
            day[left] += 1
            start[left] += DAY_S
            left = left[~self._is_there(rows[left], day[left])]
        return start

    def longest_s(self) -> Times:
        """The longest stretch of each device (N,), in seconds."""
        return self.lasts_s.astype(np.float64)

    def _last(self, rows: Rows, now: float) -> tuple[Rows, Times]:
        """The number of the stretch that would have begun last, and the seconds since."""
        since = now - self.begins_s[rows].astype(np.float64)
        day = np.floor(since / DAY_S)
        return day.astype(np.int64), since - day * DAY_S

    def _is_there(self, rows: Rows, day: Rows) -> NDArray[np.bool_]:
        """Whether a device has its stretch on that day: by a hash, so that days need no memory."""
        mixed = (rows * 0x9E3779B1 + (day + self.seed + 7) * 0x85EBCA77).astype(np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.chance
