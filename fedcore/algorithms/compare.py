"""Comparison: devices measure two models on the same examples, and report how they differ.

Paulik et al., "Federated evaluation and tuning for on-device personalization: system design & applications", 2021. The
differences are paired: what a device's examples have in common, such as being hard, is in both and cancels out. With m
of a model the device's own mean of a metric in its range, and x its examples (`fedcore.algorithms.evaluation`):

    on the phone    sums of every metric at the model `params`, then at the model `other`, on the same examples
                    d = m(params) − m(other); x, x²; d, d², d x, d x², d² x² of every metric; 1 where params is better
    on the server   the models stay. Of the sums: the mean difference over devices and over examples with intervals,
                    and the share of devices for which `params` is better (`fedcore.figures`)

A loss is better where it is lower, every other metric where it is higher. Trap: two evaluations, one of each model, are
no comparison. Their devices differ, and so the interval of the difference is many times as wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.evaluation import Measuring, better, difference_figures, difference_ranges, differences
from fedcore.ranges import Range


@dataclass(frozen=True, slots=True)
class Compare(Measuring):
    """Down: 2d and constants. Up: a few numbers of every metric. Server state: both models, constants."""

    name: ClassVar[str] = "compare"

    @property
    def passes(self) -> tuple[Pass, ...]:
        return self.measuring("measure", "params"), self.measuring("measure_other", "other")

    @property
    def ranges(self) -> dict[str, Range]:
        """The bounds and the precision of what devices report (docs/spec/plan.md §5.3)."""
        return difference_ranges(self)

    def init(self, params_D: Vector) -> State:
        state = Measuring.init(self, params_D)
        return state | {"other": params_D, "better": better(params_D, self.measured)}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return differences(self, broadcast, carries["measure_other"], carries["measure"])

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return dict(state)

    def figures(self, mean: Report, step: ServerStep) -> dict[str, float]:
        """Mean differences with intervals, the share of devices that `params` is better for, and counts."""
        return difference_figures(self, self.name, mean, step)
