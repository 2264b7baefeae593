"""The sums of a round: one float64 vector with ranges for reports, metrics, the weight and the number of clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from export.model import Model
from fedcore.algorithms.algorithm import Algorithm, ClientState, Report, trips_of
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.rehearsal import bowl, contribute, received

# So many clients at most are summed in float32, before the sum is added in float64.
SUMMED_TOGETHER = 20


@dataclass(frozen=True, slots=True)
class SumsLayout:
    """What a trip sums: `report`, sizes by name; and `metrics`, sizes by pass. In a vector they lie in this order.

    bounded: whether reports are clipped, so that one that is not finite counts as zeros (`ReportLayout.bounded`).
    """

    report: Mapping[str, int]
    metrics: Mapping[str, int]
    bounded: bool = False

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
    layouts, bounded = [], isinstance(algorithm, Clipped)
    for trip in trips_of(algorithm):
        report = contribute(trip, received(algorithm, trip.broadcast(state)), bowl)
        sizes = {name: vector.shape[-1] for name, vector in report.items()}
        layouts.append(SumsLayout(sizes, {item.name: len(model.metrics) for item in trip.passes}, bounded))
    return tuple(layouts)


class RoundSums:
    """Named views of one vector (S,), float64, to which clients are added. It begins with zeros."""

    def __init__(self, layout: SumsLayout, vector: Tensor) -> None:
        self._bounded, self.layout, names = layout.bounded, layout, (*layout.report, *layout.metrics)
        self.vector = vector[: layout.size].zero_()
        parts = torch.split(self.vector, [*layout.report.values(), *layout.metrics.values(), 1, 1])
        named = dict(zip(names, parts[:-2], strict=True))
        self.report = {name: named[name] for name in layout.report}
        self.metrics = {name: named[name] for name in layout.metrics}
        self.weight, self.contributors = parts[-2:]

    def add(
        self,
        report_K: Report,
        metrics_K: Mapping[str, Tensor],
        weight_K: Tensor,
        kept_K: ClientState,
        clip: Tensor | None = None,
    ) -> Tensor:
        """Add the clients whose every value is finite once weighted, and of others the weight if reports are bounded.

        clip: the bound (1,) that clients received, to which bounded reports are held as on a device.
        The number of clients is that of finite ones. Gives which those are, bool (K,).
        """
        factor_K = weight_K if clip is None or not self._bounded else weight_K * _within(report_K, clip)
        ranges = [slice(start, start + SUMMED_TOGETHER) for start in range(0, len(weight_K), SUMMED_TOGETHER)]
        groups = [
            _Group(_rows(report_K, few), _rows(metrics_K, few), _rows(kept_K, few), weight_K[few], factor_K[few])
            for few in ranges
        ]
        sums = [_sums(group.report, group.metrics, group.factor) for group in groups]
        # A sum is finite only where all its terms are, and takes no memory; finite values may overflow it, too.
        totals = [_total((*one.values(), *group.kept.values())) for one, group in zip(sums, groups, strict=True)]
        finite = torch.stack(totals).isfinite().tolist()  # of all groups at once, as this waits for a GPU
        return torch.cat([self._add(*one) for one in zip(groups, sums, finite, strict=True)])

    def _add(self, group: _Group, sums: Mapping[str, Tensor], finite: bool) -> Tensor:
        """Add a group. sums: of all its clients; to be taken if they are `finite`."""
        finite_K = torch.ones_like(group.weight, dtype=torch.bool)
        if not finite:
            finite_K = _finite(group)
            report_K, metrics_K = (
                {name: value[finite_K].double() for name, value in vectors.items()}
                for vectors in (group.report, group.metrics)
            )
            sums = _sums(report_K, metrics_K, group.factor[finite_K].double())
        for name, total in (self.report | self.metrics).items():
            total.add_(sums[name])
        counting_K = group.weight if self._bounded else group.weight * finite_K
        self.weight += counting_K.sum(dtype=torch.float64)
        self.contributors += finite_K.sum()
        return finite_K


class _Group(NamedTuple):
    """What a few clients report, measure, keep and weigh, (K, …) each. factor: what reports are multiplied by."""

    report: Report
    metrics: Mapping[str, Tensor]
    kept: ClientState
    weight: Tensor
    factor: Tensor


def _within(report_K: Report, clip: Tensor) -> Tensor:
    """The factors (K,) by which reports are scaled down to an l2 norm of `clip`, 1 at most."""
    norms = [torch.linalg.vector_norm(value, dim=-1, dtype=torch.float64) for value in report_K.values()]
    factors_K: Tensor = clip / torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return factors_K.clamp(max=1).float()


def _sums(report_K: Report, metrics_K: Mapping[str, Tensor], factor_K: Tensor) -> dict[str, Tensor]:
    """The weighted sums of reports, and the sums of metrics, over clients."""
    weighted = {name: torch.mv(value.T, factor_K) for name, value in report_K.items()}
    return weighted | {name: value.sum(0) for name, value in metrics_K.items()}


def _total(vectors: Iterable[Tensor]) -> Tensor:
    """The sum of all values."""
    return torch.stack([vector.sum() for vector in vectors]).sum()


def _finite(group: _Group) -> Tensor:
    """Which clients have nothing but finite values, bool (K,)."""
    weighted = (value * group.weight[:, None] for value in group.report.values())
    everything = (*weighted, *group.metrics.values(), *group.kept.values())
    return torch.stack([torch.isfinite(value).all(-1) for value in everything]).all(0)


def _rows(vectors_K: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in vectors_K.items()}
