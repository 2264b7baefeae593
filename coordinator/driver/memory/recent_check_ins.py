"""Recent check-ins: when the last one was accepted, and why devices were rejected.

Only in memory, and only counts: nothing of a single device. Safe from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TypeAlias

_SPAN_S = 60.0
"""Rejections are counted over one to two of these: a device that was sent away comes back after a minute."""
ByTask: TypeAlias = "defaultdict[str, Counter[str]]"


class CheckInLog:
    """The arrivals at one coordinator. Times are on the driver's clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._spans: dict[int, ByTask] = {}

    def accepted(self, population: str, now: float) -> None:
        """Note an accepted check-in."""
        self._last[population] = now

    def rejected(self, obstacles: Mapping[str, str], now: float) -> None:
        """Count a rejected check-in: the obstacle between the device and each task."""
        with self._lock:
            counts = self._counts_at(now)
            for task, obstacle in obstacles.items():
                counts[task][obstacle] += 1

    def heard(self, obstacles: Mapping[str, Mapping[str, int]], now: float) -> None:
        """Count rejected check-ins, by task and by the obstacle between their devices and it."""
        with self._lock:
            counts = self._counts_at(now)
            for task, by_obstacle in obstacles.items():
                counts[task].update(by_obstacle)

    def accepted_at(self, population: str) -> float | None:
        """When the last check-in to a population was accepted; None when none was."""
        return self._last.get(population)

    def lately(self, task: str, now: float) -> Counter[str]:
        """The rejected check-ins of the last minute or two, by the obstacle between the device and a task."""
        with self._lock:
            self._forget_before(int(now // _SPAN_S) - 1)
            return sum((counts[task] for counts in self._spans.values() if task in counts), Counter[str]())

    def _counts_at(self, now: float) -> ByTask:
        span = int(now // _SPAN_S)
        if span not in self._spans:
            self._forget_before(span - 1)
            self._spans[span] = defaultdict(Counter)
        return self._spans[span]

    def _forget_before(self, first: int) -> None:
        self._spans = {span: counts for span, counts in self._spans.items() if span >= first}
