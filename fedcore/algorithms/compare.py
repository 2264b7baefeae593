"""Comparison: devices measure two models on the same examples, and report how they differ.

Paulik et al., "Federated evaluation and tuning for on-device personalization: system design & applications", 2021. The
differences are paired: what a device's examples have in common, such as being hard, is in both and cancels out. With m
of a model the device's own mean of a metric in its range, and x its examples (`fedcore.algorithms.evaluation`):

    on the phone    sums of every metric at the model `params`, then at the model `other`, on the same examples
                    d = m(params) − m(other); x, x²; d, d², d x, d x², d² x² of every metric; 1 where params is better
    on the server   the models stay. Of the sums: the mean difference over devices and over examples with intervals,
                    and the share of devices for which `params` is better (`fedcore.algorithms.evaluation`)

A loss is better where it is lower, every other metric where it is higher. Trap: two evaluations, one of each model, are
no comparison. Their devices differ, and so the interval of the difference is many times as wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Pass, Report, State, Vector
from fedcore.algorithms.evaluation import MeasuringTwice


@dataclass(frozen=True, slots=True)
class Compare(MeasuringTwice):
    """Down: 2d and constants. Up: a few numbers of every metric. Server state: both models, constants."""

    name: ClassVar[str] = "compare"

    @property
    def passes(self) -> tuple[Pass, ...]:
        return self.measuring("measure", "params"), self.measuring("measure_other", "other")

    def init(self, params_D: Vector) -> State:
        return MeasuringTwice.init(self, params_D) | {"other": params_D}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return self.differences(broadcast, carries["measure_other"], carries["measure"])
