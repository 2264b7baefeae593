"""Expected returns: when each device that was sent away may come back, so that pacing counts it once until then."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet

from fedcore.wire.messages import RetryWindow

LIMIT = 1 << 17
"""Devices that are remembered, at about 330 bytes each. One that comes too early is counted twice at most as often as
so many others were sent away since."""


class ExpectedReturns:
    """The windows of at most `limit` devices that were sent away, those of the last ones. For one thread at a time."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._windows: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def expect(self, population: str, device: str, window: RetryWindow, now: float) -> None:
        """Expect a device within a window from now; the one that was expected longest may be forgotten."""
        key = population, device
        self._windows[key] = now + window.min_s, now + window.max_s
        self._windows.move_to_end(key)
        if len(self._windows) > self._limit:
            self._windows.popitem(last=False)

    def left(self, population: str, device: str, now: float) -> RetryWindow | None:
        """The rest of its window for a device that comes too early, which changes nothing; None for any other."""
        key = population, device
        first, last = self._windows.get(key, (now, now))
        if now < first:
            return RetryWindow(first - now, last - now)
        self._windows.pop(key, None)
        return None

    def forget(self, populations: AbstractSet[str]) -> None:
        """Let every device of these populations come."""
        for key in [key for key in self._windows if key[0] in populations]:
            del self._windows[key]
