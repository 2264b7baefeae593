"""Counts of check-ins by population, for the dashboard: devices, what they run, and when they came.

In the memory of this process, and bounded, whatever devices state. Nothing of it is written.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedcore.wire.messages import StatedCapabilities

_MOST_KINDS, _LONGEST = 30, 60
_MOST_POPULATIONS, _MOST_DEVICES = 1000, 100_000
SPAN_S, _SPANS = 600.0, 144
"""Check-ins are counted in spans of ten minutes, for a day."""
AWAKE_S = 600.0
OTHER = "other"


@dataclass(frozen=True, slots=True)
class PopulationCounts:
    """Counts of a population: devices of the last day, and of the last ten minutes; check-ins by what devices state.

    over_time: check-ins by when their span began, in seconds since 1970, ascending.
    """

    known: int
    awake: int
    runtimes: Mapping[str, int]
    versions: Mapping[str, int]
    over_time: tuple[tuple[float, int], ...]


@dataclass(slots=True)
class _Population:
    seen: OrderedDict[int, float] = field(default_factory=OrderedDict)
    runtimes: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)
    spans: Counter[int] = field(default_factory=Counter)


class CheckInCounts:
    """The check-ins at this process since it began. Safe from any thread; times in seconds since 1970."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._populations: dict[str, _Population] = {}

    def add(self, population: str, device: str, able: StatedCapabilities, now: float) -> None:
        """Count a check-in of a device; those of populations beyond a thousand are not."""
        with self._lock:
            one = self._populations.get(population)
            if one is None:
                if len(self._populations) >= _MOST_POPULATIONS:
                    return
                one = self._populations[population] = _Population()
            _count(one.runtimes, f"{able.runtime}, {able.engine}")
            _count(one.versions, f"{able.runtime} {able.version}")
            span = int(now // SPAN_S)
            if span not in one.spans:
                _forget_spans(one, now)
            one.spans[span] += 1
            # A hash, so that no id is kept: only how many there are is of interest.
            one.seen[hash(device)] = now
            one.seen.move_to_end(hash(device))
            _forget_devices(one, now)

    def of(self, population: str, now: float) -> PopulationCounts:
        """The counts of a population."""
        with self._lock:
            one = self._populations.get(population, _Population())
            _forget_spans(one, now)
            _forget_devices(one, now)
            awake = sum(at >= now - AWAKE_S for at in one.seen.values())
            over_time = tuple((span * SPAN_S, count) for span, count in sorted(one.spans.items()))
            runtimes, versions = (dict(counts.most_common()) for counts in (one.runtimes, one.versions))
            return PopulationCounts(len(one.seen), awake, runtimes, versions, over_time)


def _count(counts: Counter[str], stated: str) -> None:
    kind = stated[:_LONGEST]
    counts[kind if kind in counts or len(counts) < _MOST_KINDS else OTHER] += 1


def _forget_spans(one: _Population, now: float) -> None:
    first = int(now // SPAN_S) - _SPANS
    for span in [span for span in one.spans if span < first]:
        del one.spans[span]


def _forget_devices(one: _Population, now: float) -> None:
    while one.seen and (len(one.seen) > _MOST_DEVICES or next(iter(one.seen.values())) < now - SPAN_S * _SPANS):
        one.seen.popitem(last=False)
