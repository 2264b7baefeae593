"""The common part of algorithms that measure a model: ranges of metrics, measuring passes, and moments.

A device has n examples and sums S over them. It reports, of every metric, in numbers from 0 to 1 (differences from −1):

    x = min(n / max_examples, 1)          m = (S / n − low) / (high − low), clamped to 0 … 1
    x, x²                                 of the device
    v, v², v x, v x², v² x²               of every metric; v is m, or the difference of two m

A sum of these over devices is all that `fedcore.figures` needs, so the bounds of clear reports, the clip of secure
aggregation and that of privacy work as they do for training.

Traps: values outside a range count as its end, and examples above max_examples count as that many. Of a device alone
nothing is sent that a round of training does not send too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

from fedcore.algorithms.algorithm import (
    Broadcast,
    Carry,
    Measure,
    Pass,
    Report,
    ServerStep,
    State,
    Vector,
)
from fedcore.algorithms.clipped import clamped, constants, indicator
from fedcore.algorithms.settings import count, text
from fedcore.errors import InvalidSetting
from fedcore.figures import Ranged, counts, means
from fedcore.ranges import MOST_BITS, Range
from fedcore.schedule import Loop, Weighting
from fedcore.validation import offered

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
