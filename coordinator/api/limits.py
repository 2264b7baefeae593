"""Limits of the device API: requests of a caller, requests in progress, memory for reports. Per process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.errors import TooLarge, TooManyRequests, Unavailable
from coordinator.settings import Settings
from ingress.connection import memory_of
from ingress.limits import Newcomers, RateLimit

DRAWN_AT_ONCE = 4
"""Answers to operators that are made at a time, and parts of live pages: they take a few of the threads and of the
connections to the database, which devices and the driver need too."""
_TURN_S = 0.25
"""How long a turn of the event loop answers check-ins: a burst is served, a lasting overload is shed."""
_NEWCOMERS = 8
"""One in this many requests in progress may be an enrolment on its way."""
_SPARE = 8
"""The memory kept for the next reports is at most this part (1/8) of the whole budget."""


def admit(limit: RateLimit, caller: str) -> None:
    """Count a caller's request. Raises TooManyRequests, which counts nothing, saying when the next one is admitted."""
    wait_s = limit.wait_s(caller)
    if wait_s:
        raise TooManyRequests("too many requests in a minute; come back later", wait_s)


class ConnectionLimit:
    """At most `most` requests in progress at a time, and `most_of_caller` of one caller; 0 means no limit for a caller.

    Those that wait for an assignment count too.
    """

    def __init__(self, most: int, most_of_caller: int = 0) -> None:
        self._most = most
        self._most_of_caller = most_of_caller
        self._of: Counter[str] = Counter()
        self.held = 0

    @contextmanager
    def hold(self, caller: str | None = None) -> Iterator[None]:
        """Count a request while the block runs. Raises Unavailable, or TooManyRequests when its caller has too many."""
        if self.held >= self._most:
            raise Unavailable("too many requests are in progress; come back later")
        if caller is not None and 0 < self._most_of_caller <= self._of[caller]:
            raise TooManyRequests("this address has too many requests in progress; come back later", 1.0)
        self.held += 1
        if caller is not None:
            self._of[caller] += 1
        try:
            yield
        finally:
            self.held -= 1
            if caller is not None:
                self._of[caller] -= 1
                if not self._of[caller]:
                    del self._of[caller]


class CheckInShedder:
    """Sheds check-ins when more come than can be answered: then one turn of the event loop takes long.

    Requests that have arrived when a turn begins are answered in that turn, one after the other. A check-in that a
    turn does not reach in time is refused, at a small part of the cost of an answer. Reports and other requests of
    devices that have an assignment are never shed.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None

    def must_shed(self) -> bool:
        """Whether the turn of the event loop reached this check-in too late."""
        now = self._clock()
        if self._began is None:
            self._began = now
            asyncio.get_running_loop().call_soon(self._end)
        return now - self._began > _TURN_S

    def _end(self) -> None:
        self._began = None


class MemoryBudget:
    """Memory for reports that wait for their sum, or for deltas: `size` bytes in all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spare: list[memoryview] = []
        self.taken = 0

    def take(self, size: int) -> None:
        """Reserve bytes. Raises TooLarge beyond the whole budget, Unavailable beyond its rest."""
        if size > self._size:
            raise TooLarge(f"reports take at most {self._size} bytes here")
        if self.taken + size > self._size:
            raise Unavailable("there is no room for another report now; come back later")
        self.taken += size
        if self.taken + sum(map(len, self._spare)) > self._size:
            self._spare.clear()

    def free(self, size: int) -> None:
        """Give reserved bytes back."""
        self.taken -= size

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserve bytes while the block runs. Raises as `take` does."""
        self.take(size)
        try:
            yield
        finally:
            self.free(size)

    @contextmanager
    def hold(self, size: int) -> Iterator[memoryview]:
        """Memory of `size` bytes while the block runs, not to be read afterwards. Raises as `take` does.

        It is used again: the first touch of new memory costs a tenth of the time that a report takes.
        """
        with self.reserve(size):
            if self._spare and len(self._spare[0]) != size:
                self._spare.clear()
            memory = self._spare.pop() if self._spare else memory_of(size)
            yield memory
            # Not when the block failed: then somebody may still read it.
            if (len(self._spare) + 1) * size <= min(self._size // _SPARE, self._size - self.taken):
                self._spare.append(memory)


class Limits:
    """All limits of requests: of an address and of a device, check-ins, in progress, enrolments, memory for reports.

    sent_away: called with the assignment of a request that was refused because too many were in progress.
    """

    def __init__(self, settings: Settings) -> None:
        self.address = RateLimit(settings.address_limit_per_minute)
        self.device = RateLimit(settings.device_limit_per_minute)
        self.shedder = CheckInShedder()
        self.connections = ConnectionLimit(settings.connection_limit, settings.address_connection_limit)
        self.newcomers = Newcomers(max(1, settings.connection_limit // _NEWCOMERS))
        self.reports = MemoryBudget(settings.reports_bytes)
        self.deltas = MemoryBudget(settings.deltas_bytes)
        self.sent_away: Callable[[str], None] = lambda assignment: None
