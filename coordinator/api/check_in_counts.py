"""Counts of check-ins by population, for the dashboard: devices, what they run, and when they came.

In the memory of this process, and bounded, whatever devices state; nothing of it is written. Populations are those that
operators made: a check-in for another one is refused and not counted.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from fedcore.wire.messages import StatedCapabilities

_MOST_KINDS, _LONGEST = 30, 60
_MOST_DEVICES = 100_000
"""Devices that are remembered at once, of all populations together."""
SPAN_S, _SPANS = 600.0, 144
"""Check-ins are counted in spans of ten minutes, for a day."""
AWAKE_S = 600.0
OTHER = "other"


@dataclass(frozen=True, slots=True)
class PopulationCounts:
    """Counts of a population: devices of the last day, and of the last ten minutes; check-ins by what devices state.

    over_time: check-ins by when their span began, in seconds since 1970, ascending, from the first to this moment's.
    """

    devices: int
    awake: int
    runtimes: Mapping[str, int]
    versions: Mapping[str, int]
    over_time: tuple[tuple[float, int], ...]


@dataclass(slots=True)
class _Population:
    devices: int = 0
    runtimes: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)
    spans: Counter[int] = field(default_factory=Counter)


class CheckInCounts:
    """The check-ins at this process since it began. Safe from any thread; times in seconds since 1970."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._populations: defaultdict[str, _Population] = defaultdict(_Population)
        self._seen: OrderedDict[tuple[str, int], float] = OrderedDict()
        """When each device of a population last came, the latest last."""

    def add(self, population: str, device: str, able: StatedCapabilities, now: float) -> None:
        """Count a check-in of a device for a population that exists."""
        with self._lock:
            counts = self._populations[population]
            _count(counts.runtimes, f"{able.runtime}, {able.engine}")
            _count(counts.versions, f"{able.runtime} {able.version}")
            span = int(now // SPAN_S)
            if span not in counts.spans:
                _forget_spans(counts, now)
            counts.spans[span] += 1
            # Only a hash is kept, not the id: we only count devices.
            key = population, hash(device)
            counts.devices += key not in self._seen
            self._seen[key] = now
            self._seen.move_to_end(key)
            self._forget_devices(now)

    def of(self, population: str, now: float) -> PopulationCounts:
        """The counts of a population."""
        with self._lock:
            counts = self._populations.get(population, _Population())
            _forget_spans(counts, now)
            self._forget_devices(now)
            latest = takewhile(lambda seen: seen[1] >= now - AWAKE_S, reversed(self._seen.items()))
            awake = sum(name == population for (name, _), _ in latest)
            spans = range(min(counts.spans), int(now // SPAN_S) + 1) if counts.spans else ()
            over_time = tuple((span * SPAN_S, counts.spans[span]) for span in spans)
            runtimes, versions = (dict(tally.most_common()) for tally in (counts.runtimes, counts.versions))
            return PopulationCounts(counts.devices, awake, runtimes, versions, over_time)

    def _forget_devices(self, now: float) -> None:
        first = now - SPAN_S * _SPANS
        while self._seen and (len(self._seen) > _MOST_DEVICES or next(iter(self._seen.values())) < first):
            (population, _), _ = self._seen.popitem(last=False)
            self._populations[population].devices -= 1


def _count(counts: Counter[str], stated: str) -> None:
    kind = stated[:_LONGEST]
    counts[kind if kind in counts or len(counts) < _MOST_KINDS else OTHER] += 1


def _forget_spans(counts: _Population, now: float) -> None:
    first = int(now // SPAN_S) - _SPANS
    for span in [span for span in counts.spans if span < first]:
        del counts.spans[span]
