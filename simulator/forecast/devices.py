"""A modelled population as arrays: a row of each for every device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.selection import Capabilities
from fedcore.conditions import StatedConditions, rounded_down
from simulator.forecast.configuration import COLLECTION, FORMAT, ForecastConfig

DAY_S = 86_400.0
_EVENING_S, _EVENING_SPREAD_S = 22.5 * 3600.0, 2 * 3600.0
_STRETCH_SPREAD, _BANDWIDTH_SPREAD, _EXAMPLES_SPREAD = 0.4, 0.8, 1.0

Rows = NDArray[np.int64]
Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Devices:
    """The properties of N devices, each an array (N,).

    zone: hours ahead of UTC. begins_s: start of its stretch, in seconds of a UTC day; stretch_s: its length. slow: CPU
    time over that of the median device. bandwidth: bytes a second. obstacle: index into `obstacles`, 0 for none.
    """

    zone: NDArray[np.int8]
    begins_s: NDArray[np.float32]
    stretch_s: NDArray[np.float32]
    slow: NDArray[np.float32]
    bandwidth: NDArray[np.float32]
    examples: NDArray[np.int32]
    obstacle: NDArray[np.int8]
    obstacles: tuple[str, ...]
    charges: float
    seed: int

    @classmethod
    def drawn(cls, config: ForecastConfig) -> Devices:
        """The population of a configuration."""
        chance, count = np.random.default_rng(config.seed), config.devices
        zone = chance.integers(0, config.time_zones, count).astype(np.int8)
        begins = (chance.normal(_EVENING_S, _EVENING_SPREAD_S, count) - 3600.0 * zone) % DAY_S
        stretch = np.minimum(config.charging_s * np.exp(chance.normal(0, _STRETCH_SPREAD, count)), DAY_S)
        slow = np.exp(chance.normal(0, config.speed_spread, count))
        bandwidth = config.bandwidth * np.exp(chance.normal(0, _BANDWIDTH_SPREAD, count))
        examples = np.clip(config.median_examples * np.exp(chance.normal(0, _EXAMPLES_SPREAD, count)), 1, 2**31 - 1)
        held = examples.astype(np.int32)
        obstacle, obstacles = _judged(config, held, chance.random(count) < config.unmetered)
        narrow = (values.astype(np.float32) for values in (begins, stretch, slow, bandwidth))
        return cls(zone, *narrow, held, obstacle, obstacles, config.charges, config.seed)

    def can_until(self, rows: Rows, now: float) -> Times:
        """The end of the stretch in which each of `rows` can come now; 0 where it cannot."""
        day, into = self._stretch(rows, now)
        inside = (into < self.stretch_s[rows]) & self._charged(rows, day)
        return np.where(inside, now - into + self.stretch_s[rows], 0.0)

    def next_stretch(self, rows: Rows, now: float) -> Times:
        """The start of the next stretch of each of `rows`, after now."""
        day, into = self._stretch(rows, now)
        start = now - into
        left = np.arange(len(rows))
        while len(left):
            day[left] += 1
            start[left] += DAY_S
            left = left[~self._charged(rows[left], day[left])]
        return start

    def _stretch(self, rows: Rows, now: float) -> tuple[Rows, Times]:
        """The number of the stretch that began last, and the seconds since."""
        since = now - self.begins_s[rows].astype(np.float64)
        day = np.floor(since / DAY_S)
        return day.astype(np.int64), since - day * DAY_S

    def _charged(self, rows: Rows, day: Rows) -> NDArray[np.bool_]:
        """Whether a device is charged on that day: by a hash, so that a million devices' days need no memory."""
        mixed = (rows * 0x9E3779B1 + (day + self.seed + 7) * 0x85EBCA77).astype(np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.charges


def _judged(
    config: ForecastConfig, examples: NDArray[np.int32], unmetered: NDArray[np.bool_]
) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """What keeps each device out. The rule judges each kind once: devices that state the same are judged alike."""
    powers = np.floor(np.log2(examples)).astype(np.int64)
    kinds, kind = np.unique(powers * 2 + unmetered, return_inverse=True)
    names, judged = [""], []
    for one in kinds:
        conditions = StatedConditions(charging=True, idle=True, unmetered=bool(one % 2))
        able = Capabilities(frozenset({FORMAT}), {COLLECTION: rounded_down(2 ** int(one // 2))}, conditions=conditions)
        obstacle = config.needs.unmet_by("", able)
        names += [] if obstacle in names else [obstacle]
        judged.append(names.index(obstacle))
    return np.array(judged, np.int8)[kind], tuple(names)
