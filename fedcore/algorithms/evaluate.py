"""Evaluation: devices measure a model on their examples, and it stays as it is.

Paulik et al., "Federated evaluation and tuning for on-device personalization: system design & applications", 2021. The
model is in eval mode, nothing is drawn, and no gradient is computed. With m the device's own mean of a metric in its
range, and x its examples (`fedcore.algorithms.evaluation`):

    on the phone    sums S of every metric at the received model, in one sweep
                    x, x²; m, m², m x, m x², m² x² of every metric; 1 in the one of its bins that m lies in, else 0
    on the server   the model stays. Of the sums: means over devices and over examples with their intervals, and
                    percentiles over devices (`fedcore.algorithms.evaluation`)

So the sum of the last is a histogram over devices that no one can take apart under secure aggregation, and the norm of
a report is √(2 + 6 N) at most with N metrics. Trap: an edge lies a thousandth of a bin lower than j / bins, lest a
value such as 3 / 20 be on either side of it by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.clipped import constants, indicator
from fedcore.algorithms.evaluation import ZERO_OR_ONE, Measuring, counts, means, percentiles
from fedcore.algorithms.settings import count
from fedcore.schedule import Range

_LOWER = 1e-3


@dataclass(frozen=True, slots=True)
class Evaluate(Measuring):
    """Down: d and constants. Up: a few numbers and a histogram of every metric. Server state: the model, constants.

    bins: bins of the histograms, each of that part of a metric's range.
    """

    name: ClassVar[str] = "evaluate"

    bins: int = count(20, least=2)

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (self.measuring("measure", "params"),)

    @property
    def ranges(self) -> dict[str, Range]:
        """The bounds and the precision of what devices report (docs/spec/plan.md §5.3)."""
        return self.ranges_of_moments(0.0) | {f"bins_{one.name}": ZERO_OR_ONE for one in self.measured}

    def init(self, params_D: Vector) -> State:
        edges = [-1.0, *((index - _LOWER) / self.bins for index in range(1, self.bins)), 2.0]
        return Measuring.init(self, params_D) | {"edges": constants(params_D, edges)}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        m_N = self.means_in_range(broadcast, carries["measure"])
        report = self.moments(carries["measure"], m_N)
        for index, ranged in enumerate(self.measured):
            m = m_N[..., index : index + 1]
            within = indicator(m >= broadcast["edges"][..., :-1], m) * (m < broadcast["edges"][..., 1:])
            report[f"bins_{ranged.name}"] = within
        return report

    def figures(self, mean: Report, step: ServerStep) -> dict[str, float]:
        """Means with intervals, percentiles, and the numbers of devices and examples."""
        figures = counts(self.name, mean, step.devices, self.max_examples)
        figures |= means(self.name, self.measured, mean, step.devices)
        for ranged in self.measured:
            figures |= percentiles(self.name, ranged, mean[f"bins_{ranged.name}"])
        return figures
