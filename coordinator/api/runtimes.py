"""Counts of the runtimes that devices state, for the dashboard."""

from __future__ import annotations

from collections import Counter

_MOST_KINDS, _LONGEST = 30, 60
OTHER = "other"


class Runtimes:
    """Check-ins by runtime since this process began. Devices may state anything: names are few, and none is long."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, runtime: str) -> None:
        """Count a check-in."""
        kind = runtime[:_LONGEST]
        self._counts[kind if kind in self._counts or len(self._counts) < _MOST_KINDS else OTHER] += 1

    def counts(self) -> list[tuple[str, int]]:
        """Runtimes and their check-ins, most first."""
        return self._counts.copy().most_common()
