"""A limit on the request rate of each caller."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

_WINDOW_S = 60.0
_MOST_CALLERS = 500_000
"""The most callers that are remembered, about 100 MB; beyond it the least recent one is forgotten."""


class RateLimit:
    """At most `per_minute` requests of each caller in any minute, by the generic cell rate algorithm (ITU-T I.371).

    Each caller is stored as one number, the time at which its whole allowance is free again. So a request takes
    constant time and memory, even with a million callers. 0 per minute is no limit.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = _WINDOW_S / per_minute if per_minute else 0.0
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, caller: str) -> float:
        """Count a request and return 0. Beyond the limit, return the seconds until it is admitted, uncounted."""
        if not self._interval_s:
            return 0.0
        now = self._clock()
        free_at = max(now, self._free_at.get(caller, now)) + self._interval_s
        # The margin is for rounding: the last request of a full minute is allowed.
        if free_at - now > _WINDOW_S + 1e-6:
            return free_at - now - _WINDOW_S
        self._free_at[caller] = free_at
        self._free_at.move_to_end(caller)
        if len(self._free_at) > _MOST_CALLERS:
            self._free_at.popitem(last=False)
        return 0.0
