"""The sums of a round: one float64 vector with ranges for reports, metrics, the weight and the number of clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from export.model import Model
from fedcore.algorithms.algorithm import Algorithm, ClientState, Report, trips_of
from fedcore.algorithms.rehearsal import bowl, contribute, received


@dataclass(frozen=True, slots=True)
class SumsLayout:
    """What a trip sums: `report`, sizes by name; and `metrics`, sizes by pass. In a vector they lie in this order."""

    report: Mapping[str, int]
    metrics: Mapping[str, int]

    @property
    def reported(self) -> int:
        """Values of a client's report."""
        return sum(self.report.values())

    @property
    def size(self) -> int:
        """Values of the whole vector, S: reports, metrics, the weight, the number of clients."""
        return self.reported + sum(self.metrics.values()) + 2


def layouts_of(model: Model, algorithm: Algorithm) -> tuple[SumsLayout, ...]:
    """The layout of every trip, read from a rehearsal of the device's part that computes nothing."""
    state = algorithm.init(torch.empty(model.schema.size, device="meta"))
    layouts = []
    for trip in trips_of(algorithm):
        report = contribute(trip, received(algorithm, trip.broadcast(state)), bowl)
        sizes = {name: vector.shape[-1] for name, vector in report.items()}
        layouts.append(SumsLayout(sizes, {item.name: len(model.metrics) for item in trip.passes}))
    return tuple(layouts)


class RoundSums:
    """Named views of one vector (S,), float64, to which clients are added. It begins with zeros."""

    def __init__(self, layout: SumsLayout, vector: Tensor) -> None:
        self.vector, names = vector[: layout.size].zero_(), (*layout.report, *layout.metrics)
        parts = torch.split(self.vector, [*layout.report.values(), *layout.metrics.values(), 1, 1])
        named = dict(zip(names, parts[:-2], strict=True))
        self.report = {name: named[name] for name in layout.report}
        self.metrics = {name: named[name] for name in layout.metrics}
        self.weight, self.contributors = parts[-2:]

    def add(self, report_K: Report, metrics_K: Mapping[str, Tensor], weight_K: Tensor, kept_K: ClientState) -> Tensor:
        """Add the clients whose every value is finite once weighted; the others count in nothing, as on a device.

        Gives which those are, bool (K,).
        """
        weighted = {name: value * weight_K[:, None] for name, value in report_K.items()}
        everything = [*weighted.values(), *metrics_K.values(), *kept_K.values()]
        finite_K = torch.stack([torch.isfinite(value).all(-1) for value in everything]).all(0)
        everyone = bool(finite_K.all())
        for sums, values in ((self.report, weighted), (self.metrics, metrics_K)):
            for name, value in values.items():
                kept = value if everyone else torch.where(finite_K[:, None], value, 0)
                sums[name] += kept.sum(0, dtype=torch.float64)
        self.weight += (weight_K * finite_K).sum(dtype=torch.float64)
        self.contributors += finite_K.sum()
        return finite_K
