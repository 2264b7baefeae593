"""Counts of sessions by their sequence of steps, over all devices. Thread-safe.

A shape is the steps of a session with " > " between: a check-in that is rejected at once is one step; another session
may be `accepted > waited > assigned > fetched checkpoint > reported`. Counts are kept in memory. They are written with
the next transaction that happens anyway, or after a minute, so a rejection costs none. A crash loses those of a moment.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

Counts: TypeAlias = Mapping[tuple[str, str, str], int]
"""Sessions by population, task (empty before there is one) and shape."""


class SessionCounts:
    """Counts that have not been written yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def count(self, population: str, task: str, steps: Iterable[str]) -> None:
        """Count a session that ended after these steps."""
        with self._lock:
            self._counts[population, task, " > ".join(steps)] += 1

    def any(self) -> bool:
        """Whether there are any."""
        with self._lock:
            return bool(self._counts)

    def take(self) -> Counts:
        """The counts since the last time; they are the caller's to write from now on."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return taken

    def put_back(self, counts: Counts) -> None:
        """Keep counts that were taken and could not be written."""
        with self._lock:
            self._counts.update(counts)
