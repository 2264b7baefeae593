"""Counts of sessions by their sequence of steps.

A shape is the steps of a session with " > " between: a check-in that is rejected at once is one step; another session
may be `accepted > waited > assigned > fetched checkpoint > reported`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from coordinator.tally import Tally

Counts: TypeAlias = Mapping[tuple[str, str, str], int]
"""Sessions by population, task (empty before there is one) and shape."""


class SessionCounts(Tally[tuple[str, str, str]]):
    """Counts that have not been written yet."""

    def count(self, population: str, task: str, steps: Iterable[str]) -> None:
        """Count a session that ended after these steps."""
        self.add([(population, task, " > ".join(steps))])
