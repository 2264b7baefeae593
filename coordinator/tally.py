"""Counts over all devices that have not been written yet, and nothing of a single device. Thread-safe.

They are kept in memory, and written with the next transaction that happens anyway, or after a minute, so that counting
costs no transaction. A crash loses those of a moment.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")


class Tally(Generic[K]):
    """Counts by key. most: of keys at once; others are left out until the counts are taken."""

    def __init__(self, most: int | None = None) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[K] = Counter()
        self._most = most

    def add(self, keys: Iterable[K]) -> None:
        """Count each key once."""
        with self._lock:
            for key in keys:
                if self._most is None or len(self._counts) < self._most or key in self._counts:
                    self._counts[key] += 1

    def any(self) -> bool:
        """Whether there are any."""
        with self._lock:
            return bool(self._counts)

    def take(self) -> Mapping[K, int]:
        """The counts since the last time; they are the caller's to write from now on."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return taken

    def put_back(self, counts: Mapping[K, int]) -> None:
        """Keep counts that were taken and could not be written."""
        with self._lock:
            self._counts.update(counts)
