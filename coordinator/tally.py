"""Counts that have not been written yet: of sessions and of models in use, and nothing of a single device.

They are kept in memory, and written with the next transaction that happens anyway, or after a minute, so that counting
costs no transaction. A crash loses those of a moment.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from msgspec import UNSET

from fedcore.wire.messages import CheckIn

K = TypeVar("K")


class PendingCounts(Generic[K]):
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


DAY_S = 86_400
_MOST = 10_000
"""Keys between two writes: devices may state anything, and only released versions are written."""


class Stated(NamedTuple):
    """What a check-in of a population stated of a model: the version in use, or refused; day: UTC, since 1970."""

    population: str
    name: str
    number: int
    day: int
    refused: bool


ModelCounts: TypeAlias = Mapping[Stated, int]


class ModelTally(PendingCounts[Stated]):
    """Counts that have not been written yet."""

    def __init__(self) -> None:
        super().__init__(_MOST)

    def count(self, population: str, message: CheckIn, now: float) -> None:
        """Count what a check-in states, at a time in seconds since 1970."""
        if message.models is UNSET and message.refused is UNSET:
            return
        day = int(now // DAY_S)
        stated = ((message.models or {}, False), (message.refused or {}, True))
        self.add(
            Stated(population, name, number, day, refused)
            for numbers, refused in stated
            for name, number in numbers.items()
        )


# Counts of sessions by their sequence of steps.
#
# A shape is the steps of a session with " > " between: a check-in that is rejected at once is one step; another session
# may be `accepted > waited > assigned > fetched checkpoint > reported`.

Counts: TypeAlias = Mapping[tuple[str, str, str], int]
"""Sessions by population, task (empty before there is one) and shape."""


class SessionCounts(PendingCounts[tuple[str, str, str]]):
    """Counts that have not been written yet."""

    def count(self, population: str, task: str, steps: Iterable[str]) -> None:
        """Count a session that ended after these steps."""
        self.add([(population, task, " > ".join(steps))])
