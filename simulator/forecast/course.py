"""The course of a forecast: what happened, counted as it happens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcore.wire.messages import RetryWindow
from simulator.forecast.stretches import DAY_S, Rows

BINS_PER_OCTAVE = 4


class CommittedRound(NamedTuple):
    """When a round that counted could draw devices, drew them and ended, in seconds from the start.

    devices: the rows of those whose reports it counted. behind: how many versions the model of each was behind.
    """

    opened: float
    drawn: float
    ended: float
    devices: tuple[int, ...]
    behind: tuple[int, ...]


@dataclass(slots=True)
class Rate:
    """How many things happened, by hour (hours,), and in the busiest second."""

    by_hour: NDArray[np.int64]
    peak_per_s: int = 0
    _second: int = -1
    _in_second: int = 0

    def add(self, count: int, now: float) -> None:
        """Count things that happen now; time never goes back by more than the present second."""
        self.by_hour[min(int(now // 3600), len(self.by_hour) - 1)] += count
        self._in_second = count + (self._in_second if int(now) == self._second else 0)
        self._second = int(now)
        self.peak_per_s = max(self.peak_per_s, self._in_second)


@dataclass(slots=True)
class Course:
    """What happened in all. took_part, spent_s, moved: reports, CPU seconds and bytes of each device (N,).

    stays: told windows by log₂ of their middle. wasted_s: CPU seconds of work that no round counted. paused: when and
    why the task stopped for an operator.
    """

    took_part: NDArray[np.int32]
    spent_s: NDArray[np.float32]
    moved: NDArray[np.float64]
    check_ins: Rate
    reports: Rate
    stays: Counter[int] = field(default_factory=Counter)
    rounds: list[CommittedRound] = field(default_factory=list)
    turned_away: Counter[str] = field(default_factory=Counter)
    abandoned: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    assigned: int = 0
    wasted_s: float = 0.0
    paused: tuple[float, str] | None = None

    @classmethod
    def of(cls, devices: int, days: int) -> Course:
        """A course in which nothing has happened yet."""
        by_hour = [np.zeros(int(days * DAY_S) // 3600, np.int64) for _ in range(2)]
        of_devices = np.zeros(devices, np.int32), np.zeros(devices, np.float32), np.zeros(devices)
        return cls(*of_devices, Rate(by_hour[0]), Rate(by_hour[1]))

    def beside(self) -> Course:
        """The course of another task of the population: visits and windows are those of both."""
        devices, days = len(self.took_part), len(self.check_ins.by_hour) // 24
        return replace(
            Course.of(devices, days), check_ins=self.check_ins, turned_away=self.turned_away, stays=self.stays
        )

    def sent_away(self, rows: Rows, when: RetryWindow, why: str) -> None:
        """Count devices that were told to come back within a window."""
        self.turned_away[why] += len(rows)
        self.stays[int(BINS_PER_OCTAVE * np.log2(max(1.0, (when.min_s + when.max_s) / 2)))] += len(rows)
