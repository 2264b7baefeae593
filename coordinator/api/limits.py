"""Limits of the device API: requests of a caller, requests in progress, memory for reports. Per process."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from coordinator.errors import TooLarge, TooManyRequests, Unavailable
from coordinator.settings import Settings

_WINDOW_S = 60.0
_TURN_S = 0.25
"""So long a turn of the event loop answers check-ins: a crowd that comes at once is served, a stream of them is not."""
_MOST_CALLERS = 500_000
"""Callers that are remembered, about 100 MB; beyond it the one that was quiet longest is forgotten."""
_SPARE = 8
"""Memory that is kept for the next reports is at most one part in so many of all that they may take."""


def memory_of(size: int) -> memoryview:
    """So many bytes, which are not zero: to make them so takes as long as a copy."""
    return np.empty(size, np.uint8).data


class RateLimit:
    """At most `per_minute` requests of each caller in any minute, by the generic cell rate algorithm (ITU-T I.371).

    A caller is one number, the time at which its whole minute's worth is free again: constant time and memory per
    request, also for a million callers (docs/decisions/0016-rate-limits.md). 0 per minute is no limit.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = _WINDOW_S / per_minute if per_minute else 0.0
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()

    def admit(self, caller: str) -> None:
        """Count a request. Raises TooManyRequests, which counts nothing, saying when the next one is admitted."""
        if not self._interval_s:
            return
        now = self._clock()
        free_at = max(now, self._free_at.get(caller, now)) + self._interval_s
        # The hair is for rounding: the last request of a full minute is one of those allowed.
        if free_at - now > _WINDOW_S + 1e-6:
            raise TooManyRequests(
                "more requests than are allowed in a minute; come back later", free_at - now - _WINDOW_S
            )
        self._free_at[caller] = free_at
        self._free_at.move_to_end(caller)
        if len(self._free_at) > _MOST_CALLERS:
            self._free_at.popitem(last=False)


class ConnectionLimit:
    """At most `most` requests in progress at a time; those that wait for an assignment count too."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """For the time of one request. Raises Unavailable."""
        if self.held >= self._most:
            raise Unavailable("as many requests as may be in progress are; come back later")
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1


class CheckInShedder:
    """Whether more check-ins come than are answered: then one turn of the event loop has work for a long time.

    Requests that have arrived when a turn begins are answered in that turn, one after the other. What a turn does not
    reach in time could only wait, and so would all that come meanwhile; it is sent away instead, at a small part of
    the cost. Reports and whatever else a device already works for are not counted.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None

    def too_late(self) -> bool:
        """Whether a check-in, in the event loop, is one that its turn did not reach in time."""
        now = self._clock()
        if self._began is None:
            self._began = now
            asyncio.get_running_loop().call_soon(self._end)
        return now - self._began > _TURN_S

    def _end(self) -> None:
        self._began = None


class MemoryBudget:
    """So many bytes of memory in all, for reports on their way into a sum."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spare: list[memoryview] = []
        self.taken = 0

    def take(self, size: int) -> None:
        """Reserve so many bytes. Raises TooLarge when there are never that many, Unavailable when there are not now."""
        if size > self._size:
            raise TooLarge(f"reports take at most {self._size} bytes here")
        if self.taken + size > self._size:
            raise Unavailable("as many reports as there is room for are on their way in; come back later")
        self.taken += size
        if self.taken + sum(map(len, self._spare)) > self._size:
            self._spare.clear()

    def free(self, size: int) -> None:
        """Give reserved bytes back."""
        self.taken -= size

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserve so many bytes for a while. Raises what `take` does."""
        self.take(size)
        try:
            yield
        finally:
            self.free(size)

    @contextmanager
    def hold(self, size: int) -> Iterator[memoryview]:
        """So many bytes for a while, which nobody may look at afterwards. Raises what `take` does.

        They are used again: memory that is new costs its first touch, a tenth of what taking a report in does.
        """
        with self.reserve(size):
            if self._spare and len(self._spare[0]) != size:
                self._spare.clear()
            memory = self._spare.pop() if self._spare else memory_of(size)
            yield memory
            # Not when the block failed: then somebody may look at it still.
            if (len(self._spare) + 1) * size <= min(self._size // _SPARE, self._size - self.taken):
                self._spare.append(memory)


class Limits:
    """Those of the device API: requests of an address, check-ins of a device, requests in progress, reports' bytes.

    sent_away: told of an assignment whose device asked for something, and for which there was no room.
    """

    def __init__(self, settings: Settings) -> None:
        self.address = RateLimit(settings.address_limit_per_minute)
        self.device = RateLimit(settings.device_limit_per_minute)
        self.shedder = CheckInShedder()
        self.connections = ConnectionLimit(settings.connection_limit)
        self.reports = MemoryBudget(settings.reports_bytes)
        self.sent_away: Callable[[str], None] = lambda assignment: None


@lru_cache(maxsize=1 << 14)
def caller_of(address: str) -> str | None:
    """Whom an address stands for: itself, or the /64 that an IPv6 subscriber has; None, and no limit, for loopback.

    Loopback is this machine: a fleet of emulated devices, or a proxy, which then stands for everyone.
    """
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv6Address):
        if known.ipv4_mapped is None:
            return None if known.is_loopback else known.exploded[:19]
        known = known.ipv4_mapped
    return None if known.is_loopback else str(known)
