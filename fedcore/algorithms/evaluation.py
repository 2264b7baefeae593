"""The common part of algorithms that measure a model: ranges, passes and moments, and figures made from the sums.

A device has n examples and sums S over them. It reports, of every metric, in numbers from 0 to 1 (differences from −1):

    x = min(n / max_examples, 1)          m = (S / n − low) / (high − low), clamped to 0 … 1
    x, x²                                 of the device
    v, v², v x, v x², v² x²               of every metric; v is m, or the difference of two m

A sum of these over devices is all that figures need, so the bounds of clear reports, the clip of secure
aggregation and that of privacy work as they do for training.

Traps: values outside a range count as its end, and examples above max_examples count as that many. Of a device alone
nothing is sent that a round of training does not send too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Measure, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.clipped import clamped, constants, indicator
from fedcore.algorithms.settings import count, text
from fedcore.errors import InvalidSetting
from fedcore.schedule import MOST_BITS, Loop, Range, Weighting
from fedcore.validation import offered

# Figures of an evaluation: means with intervals and percentiles, all from sums over devices.
#
# K devices give sums over devices i of the vectors that are described above. With v_i a device's own value
# and x_i its examples, two means are reported, which differ where devices with many examples have other values:
#
#     over devices    V = Σ v / K            s² = (Σ v² − K V²) / (K − 1)              V ± 1.96 s / √K
#     over examples   R = Σ v x / Σ x        z² = Σ v²x² − 2R Σ v x² + R² Σ x²         R ± 1.96 √(K z² / (K − 1)) / Σ x
#
# R is a ratio of two sums that both depend on the cohort. Its interval is that of the residuals v_i x_i − R x_i, whose
# squares add up to z²: the linearisation of Cochran, "Sampling Techniques", 3rd edition, 1977, §6.4, without the
# correction for a finite population. Both intervals are the normal distribution's, of 95 %: with less than about 30
# devices they are too narrow, and one device has none.
#
# Percentiles are over devices, from how many have their value in each of B bins. The share below an edge is the sum of
# those before it; between edges it is taken as a straight line. A percentile is therefore known to one bin, which is
# (high − low) / B.
#
# Trap: under privacy all sums have noise. A variance may come out negative, and shares below edges may fall; then the
# variance is 0, and a share is the largest so far.


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


# The common part of algorithms that measure a model: ranges of metrics, measuring passes, and moments.


AUTO = "auto"
LOSS = "loss"
EVALUATION = "evaluation"
"""The family of algorithms that measure a model and leave it as it is."""
MOST_LOSS = 10.0
"""The end of the range of the loss unless a user gives one; that of every other metric is 1."""

ZERO_OR_ONE = Range(0, 1, 1)
MOST_STEPS = 2**MOST_BITS - 1


def ranged_metrics(metrics: str) -> tuple[Ranged, ...]:
    """The metrics that a setting names, with their ranges; of "auto" the loss alone.

    Raises ValueError unless every one is `name=low..high`.
    """
    found = []
    for part in f"{LOSS}=0..{MOST_LOSS}".split(",") if metrics == AUTO else metrics.split(","):
        name, _, ends = part.strip().partition("=")
        low, _, high = ends.partition("..")
        ranged = Ranged(name, float(low), float(high))
        if not name.isidentifier() or not ranged.low < ranged.high or not isfinite(ranged.high - ranged.low):
            raise ValueError(part)
        found.append(ranged)
    if len({ranged.name for ranged in found}) < len(found):
        raise ValueError(metrics)
    return tuple(found)


def _written(metrics: str) -> str:
    """The same ranges in the one way to write them. Raises ValueError as `ranged_metrics`."""
    return AUTO if metrics == AUTO else ",".join(map(str, ranged_metrics(metrics)))


@dataclass(frozen=True, slots=True)
class Measuring:
    """The settings and the device's part of an algorithm that measures a model. Server state: the model, constants.

    metrics: the range of every metric of the model, such as loss=0..10,accuracy=0..1; with "auto" the loss has 0..10
    and every other metric 0..1.
    max_examples: a device with more examples counts as one with so many.
    batch_size: examples of a step.
    """

    name: ClassVar[str]
    family: ClassVar[str] = EVALUATION
    weighting: ClassVar[Weighting] = "uniform"

    metrics: str = text(AUTO, _written, "ranges of metrics, such as loss=0..10,accuracy=0..1, or auto")
    max_examples: int = count(1_000)
    batch_size: int = count(20)

    @property
    def measured(self) -> tuple[Ranged, ...]:
        """Every metric with its range, in the model's order."""
        return ranged_metrics(self.metrics)

    def init(self, params_D: Vector) -> State:
        low = constants(params_D, [one.low for one in self.measured])
        return {"params": params_D, "low": low, "width": constants(params_D, [one.width for one in self.measured])}

    def broadcast(self, state: State) -> Broadcast:
        return dict(state)

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return dict(state)

    def measuring(self, name: str, params: str) -> Pass:
        """The pass that sums the metrics at the model that devices receive as `params`."""

        def step(carry: Carry, received: Broadcast, measure: Measure) -> Carry:
            sums_M = measure(received[params])
            return {"examples": carry["examples"] + sums_M[..., :1], "sums": carry["sums"] + sums_M[..., 1:]}

        loop = Loop(batch_size=self.batch_size, shuffle=False)
        return Pass(name, loop, _begin, step, tuple(one.name for one in self.measured))

    def means_in_range(self, broadcast: Broadcast, carry: Carry) -> Vector:
        """The device's mean m of every metric (N,), scaled to its range: 0 … 1."""
        return clamped((carry["sums"] / carry["examples"] - broadcast["low"]) / broadcast["width"])

    def moments(self, carry: Carry, v_N: Vector) -> Report:
        """What is reported of a device's own values v, (N,)."""
        x = clamped(carry["examples"] / self.max_examples)
        return {
            "examples": x,
            "examples_squared": x * x,
            "mean": v_N,
            "mean_squared": v_N * v_N,
            "total": v_N * x,
            "total_examples": v_N * x * x,
            "total_squared": v_N * v_N * x * x,
        }

    def ranges_of_moments(self, low: float) -> dict[str, Range]:
        """The ranges of what `moments` reports of values from `low` to 1. A number of examples is one of the steps."""
        counted = Range(0, max(1.0, MOST_STEPS / self.max_examples), MOST_BITS)
        linear = dict.fromkeys(("mean", "total", "total_examples"), Range(low, 1, MOST_BITS))
        square = dict.fromkeys(("examples_squared", "mean_squared", "total_squared"), Range(0, 1, MOST_BITS))
        return {"examples": counted} | linear | square


@dataclass(frozen=True, slots=True)
class MeasuringTwice(Measuring):
    """The common part of algorithms that measure two models on the same examples, and report the differences.

    A loss is better where it is lower, every other metric where it is higher.
    """

    @property
    def ranges(self) -> dict[str, Range]:
        """The bounds and the precision of what devices report (docs/spec/plan.md §5.3)."""
        return self.ranges_of_moments(-1.0) | {"improved": ZERO_OR_ONE}

    def init(self, params_D: Vector) -> State:
        directions = [-1.0 if one.name == LOSS else 1.0 for one in self.measured]
        return Measuring.init(self, params_D) | {"better": constants(params_D, directions)}

    def differences(self, broadcast: Broadcast, first: Carry, second: Carry) -> Report:
        """What is reported of a device's differences, second − first, and of which metrics are better in the second."""
        d_N = self.means_in_range(broadcast, second) - self.means_in_range(broadcast, first)
        return self.moments(second, d_N) | {"improved": indicator(d_N * broadcast["better"] > 0, d_N)}

    def figures(self, mean: Report, step: ServerStep) -> dict[str, float]:
        """Mean differences with intervals in the unit of each metric, shares of devices that improve, and counts."""
        figures = counts(self.name, mean, step.devices, self.max_examples)
        figures |= means(self.name, self.measured, mean, step.devices, low=-1.0)
        for ranged, share in zip(self.measured, mean["improved"], strict=True):
            # Noise may move it out of 0 … 1.
            figures[f"{self.name}.{ranged.name}.improved"] = min(max(float(share), 0.0), 1.0)
        return figures


def _begin(received: Broadcast) -> Carry:
    zeros_N = 0.0 * received["low"]
    return {"examples": zeros_N[..., :1], "sums": zeros_N}


def suited_metrics(algorithm: Measuring, metrics: Sequence[str]) -> str:
    """The ranges of a model's metrics, as a setting: those of the algorithm, or the usual ones if it has "auto".

    Raises InvalidSetting, naming a metric that has no range or that the model does not have.
    """
    bad = next((name for name in metrics if not name.isidentifier()), None)
    if bad is not None:
        raise InvalidSetting(f"{algorithm.name}: the metric {bad!r} cannot be reported; name it with letters and _")
    given = {one.name: one for one in algorithm.measured}
    if algorithm.metrics == AUTO:
        given = {name: Ranged(name, 0.0, MOST_LOSS if name == LOSS else 1.0) for name in metrics}
    for name in given:
        if name not in metrics:
            raise InvalidSetting(f"{algorithm.name}: the model has no metric {name!r}; {offered(name, metrics)}")
    for name in metrics:
        if name not in given:
            raise InvalidSetting(f"{algorithm.name}: metrics gives no range for {name!r}: add {name}=low..high")
    return ",".join(str(given[name]) for name in metrics)
