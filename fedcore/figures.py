"""Figures of an evaluation: means with intervals and percentiles, all from sums over devices.

K devices give sums over devices i of the vectors of `fedcore.algorithms.evaluation`. With v_i a device's own value and
x_i its examples, two means are reported, which differ where devices with many examples have other values:

    over devices    V = Σ v / K            s² = (Σ v² − K V²) / (K − 1)                 V ± 1.96 s / √K
    over examples   R = Σ v x / Σ x        z² = Σ v²x² − 2R Σ v x² + R² Σ x²            R ± 1.96 √(K z² / (K − 1)) / Σ x

R is a ratio of two sums that both depend on the cohort. Its interval is that of the residuals v_i x_i − R x_i, whose
squares add up to z²: the linearisation of Cochran, "Sampling Techniques", 3rd edition, 1977, §6.4, without the
correction for a finite population. Both intervals are the normal distribution's, of 95 %: with less than about 30
devices they are too narrow, and one device has none.

Percentiles are over devices, from how many have their value in each of B bins. The share below an edge is the sum of
those before it; between edges it is taken as a straight line. A percentile is therefore known to one bin, which is
(high − low) / B.

Trap: under privacy all sums have noise. A variance may come out negative, and shares below edges may fall; then the
variance is 0, and a share is the largest so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

PERCENTILES = (10, 25, 50, 75, 90)
QUANTILE = 1.96
"""Of the standard normal distribution, at 97.5 %."""


@dataclass(frozen=True, slots=True)
class Ranged:
    """A metric and the ends of its range."""

    name: str
    low: float
    high: float

    @property
    def width(self) -> float:
        """The length of the range."""
        return self.high - self.low

    def __str__(self) -> str:
        low, high = (repr(end).removesuffix(".0") for end in (self.low, self.high))
        return f"{self.name}={low}..{high}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with half of its interval, which is none where it is of one device."""

    value: float
    half: float | None

    def figures(self, name: str, ranged: Ranged, low: float = 0.0) -> dict[str, float]:
        """The estimate in the unit of the metric, under `name`.

        low: the least normalised value, 0, or −1 of differences, whose 0 is no difference and not the range's low end.
        """
        zero = 0.0 if low < 0 else ranged.low
        made = {name: zero + ranged.width * self.value}
        if self.half is not None:
            made[f"{name}.low"] = zero + ranged.width * max(self.value - self.half, low)
            made[f"{name}.high"] = zero + ranged.width * min(self.value + self.half, 1.0)
        return made


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of one metric over devices: Σ v, Σ v², Σ v x, Σ v x², Σ v² x², and Σ x, Σ x² of all of them."""

    devices: int
    v: float
    v2: float
    vx: float
    vx2: float
    v2x2: float
    x: float
    x2: float

    @property
    def over_devices(self) -> Estimate:
        """V: every device counts alike."""
        count, mean = self.devices, self.v / self.devices
        if count < 2:
            return Estimate(mean, None)
        variance = max(self.v2 - count * mean**2, 0.0) / (count - 1)
        return Estimate(mean, QUANTILE * sqrt(variance / count))

    @property
    def over_examples(self) -> Estimate | None:
        """R: every example counts alike; none where noise leaves no examples."""
        if self.x <= 0:
            return None
        count, ratio = self.devices, self.vx / self.x
        if count < 2:
            return Estimate(ratio, None)
        squares = max(self.v2x2 - 2 * ratio * self.vx2 + ratio**2 * self.x2, 0.0)
        return Estimate(ratio, QUANTILE * sqrt(count * squares / (count - 1)) / self.x)


def sums_of(mean: Mapping[str, Any], devices: int, metrics: int) -> Iterator[Sums]:
    """The sums of every metric, from the mean of moments (`Measuring.moments`) over so many devices."""
    x, x2 = (devices * float(mean[name][0]) for name in ("examples", "examples_squared"))
    names = ("mean", "mean_squared", "total", "total_examples", "total_squared")
    for index in range(metrics):
        v, v2, vx, vx2, v2x2 = (devices * float(mean[name][index]) for name in names)
        yield Sums(devices, v, v2, vx, vx2, v2x2, x, x2)


def counts(prefix: str, mean: Mapping[str, Any], devices: int, max_examples: int) -> dict[str, float]:
    """The numbers of devices and of their examples, each device's at most `max_examples`."""
    return {
        f"{prefix}.devices": float(devices),
        f"{prefix}.examples": float(round(devices * float(mean["examples"][0]) * max_examples)),
    }


def means(
    prefix: str, ranges: Sequence[Ranged], mean: Mapping[str, Any], devices: int, low: float = 0.0
) -> dict[str, float]:
    """Both means of every metric with their intervals, as `<prefix>.<metric>` and `<prefix>.<metric>.devices`.

    low: the least normalised value, 0, or −1 of differences.
    """
    made: dict[str, float] = {}
    for ranged, sums in zip(ranges, sums_of(mean, devices, len(ranges)), strict=True):
        name = f"{prefix}.{ranged.name}"
        over_examples = sums.over_examples
        if over_examples is not None:
            made |= over_examples.figures(name, ranged, low)
        made |= sums.over_devices.figures(f"{name}.devices", ranged, low)
    return made


def percentiles(prefix: str, ranged: Ranged, within: Iterable[Any]) -> dict[str, float]:
    """The percentiles of a metric over devices, as `<prefix>.<metric>.p50`.

    within: for each of B bins of equal width, the share of devices with a value in it.
    """
    below_edges = list(itertools.accumulate(map(float, within)))
    bins, shares = len(below_edges), [0.0]
    for share in below_edges[:-1]:
        shares.append(min(max(share, shares[-1]), 1.0))
    shares.append(1.0)
    made = {}
    for percent in PERCENTILES:
        wanted = percent / 100
        index = next(index for index in range(1, bins + 1) if shares[index] >= wanted)
        below, in_bin = shares[index - 1], shares[index] - shares[index - 1]
        place = (index - 1 + (wanted - below) / in_bin) / bins
        made[f"{prefix}.{ranged.name}.p{percent}"] = ranged.low + ranged.width * place
    return made
