"""Clients of a cohort, the contract of their trainers, and the sums of a round in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from export.model import Model
from fedcore.algorithms.algorithm import Algorithm, ClientState, Report, ranges_of, trips_of
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.rehearsal import Bowl, contribute, received
from fedcore.batching import StreamKey
from fedcore.schedule import Range

# The most clients that are summed in float32, before the sum is added in float64; reports with ranges always are.
SUMMED_TOGETHER = 20


@dataclass(frozen=True, slots=True)
class SumsLayout:
    """The sums of a trip: `report`, sizes by name, and `metrics`, sizes by pass, in this order in a vector.

    bounded: whether reports are clipped, so that one that is not finite counts as zeros (`ReportLayout.bounded`).
    ranges: those of vectors of a report, to which every client's are clamped.
    """

    report: Mapping[str, int]
    metrics: Mapping[str, int]
    bounded: bool = False
    ranges: Mapping[str, Range] = field(default_factory=dict)

    @property
    def reported(self) -> int:
        """Values of a client's report."""
        return sum(self.report.values())

    @property
    def adds_up(self) -> bool:
        """Whether the sum of reports may be computed at once: none is clipped or clamped by itself."""
        return not self.bounded and not self.ranges

    @property
    def size(self) -> int:
        """Values of the whole vector, S: reports, metrics, the weight, the number of clients."""
        return self.reported + sum(self.metrics.values()) + 2

    def parts(self, vector: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Reports by name and metrics by pass, as views of a vector (S - 2,) without the weight and the number."""
        parts = iter(torch.split(vector, [*self.report.values(), *self.metrics.values()]))
        return {name: next(parts) for name in self.report}, {name: next(parts) for name in self.metrics}


def layouts_of(model: Model, algorithm: Algorithm) -> tuple[SumsLayout, ...]:
    """The layout of every trip, from a dry run of the device's part."""
    params_D = torch.empty(model.schema.size, device="meta")
    state = algorithm.init(params_D)
    layouts, bounded = [], isinstance(algorithm, Clipped)
    for trip in trips_of(algorithm):
        report = contribute(trip, received(algorithm, trip.broadcast(state)), Bowl(params_D))
        sizes = {name: vector.shape[-1] for name, vector in report.items()}
        metrics = {item.name: len(model.metrics) for item in trip.passes}
        layouts.append(SumsLayout(sizes, metrics, bounded, ranges_of(trip)))
    return tuple(layouts)


class RoundSums:
    """Named views of one vector (S,), float64, to which clients are added. It begins with zeros."""

    def __init__(self, layout: SumsLayout, vector: Tensor) -> None:
        self._bounded, self.layout = layout.bounded, layout
        self.vector = vector[: layout.size].zero_()
        self._summed, self.weight, self.contributors = torch.split(self.vector, [layout.size - 2, 1, 1])
        self.report, self.metrics = layout.parts(self._summed)

    def add(
        self,
        report_K: Report,
        metrics_K: Mapping[str, Tensor],
        weight_K: Tensor,
        kept_K: ClientState,
        clip: Tensor | None = None,
    ) -> Tensor:
        """Add the clients whose weighted values are all finite; of others only the weight, if reports are bounded.

        clip: the bound (1,) that clients received; bounded reports are clipped to it as on a device.
        The number of clients counts only finite ones. Returns which clients these are, bool (K,).
        """
        factor_K = weight_K if clip is None or not self._bounded else weight_K * _within(report_K, clip)
        held_K = {name: self._clamped(name, value) for name, value in report_K.items()}
        whole = _Group(held_K, metrics_K, kept_K, weight_K, factor_K)
        rows = [slice(start, start + SUMMED_TOGETHER) for start in range(0, len(weight_K), SUMMED_TOGETHER)]
        groups = [whole.only(few) for few in rows]
        if self.layout.ranges:  # whole numbers, of which float32 would round the sum
            groups = [group.double() for group in groups]
        sums = [self._sum(group) for group in groups]
        # If any term is not finite, neither is the sum, which needs no memory. Finite values may overflow it, too.
        totals = [_total(part, group.kept) for part, group in zip(sums, groups, strict=True)]
        finite = map(math.isfinite, torch.stack(totals).tolist())  # for all groups at once, as this waits for a GPU
        return torch.cat([self._add(*arguments) for arguments in zip(groups, sums, finite, strict=True)])

    def add_summed(self, report: Report, metrics_K: Mapping[str, Tensor], weight_K: Tensor) -> bool:
        """Add clients whose reports are already summed, if every value of their sum is finite. Returns whether it is.

        report: Σ weight · report of each name.
        """
        pairs = [(self.report[name], value) for name, value in report.items()]
        pairs += [(self.metrics[name], value.sum(0)) for name, value in metrics_K.items()]
        finite = math.isfinite(float(torch.stack([value.sum() for _, value in pairs]).sum()))
        if finite:
            for total, value in pairs:
                total.add_(value)
            self.weight += weight_K.sum(dtype=torch.float64)
            self.contributors += len(weight_K)
        return finite

    def _clamped(self, name: str, value_K: Tensor) -> Tensor:
        """Clients' vectors of that name, within its range; an infinite one stays, so that the client is left out."""
        within = self.layout.ranges.get(name)
        if within is None:
            return value_K
        return torch.where(value_K.isfinite(), value_K.clamp(within.low, within.high), value_K)

    def _sum(self, group: _Group) -> Tensor:
        """The weighted sums of reports and the sums of metrics, in the order of the whole vector."""
        sums = group.factor.new_empty(len(self._summed))
        report, metrics = self.layout.parts(sums)
        for name, value in group.report.items():
            torch.mv(value.T, group.factor, out=report[name])
        for name, value in group.metrics.items():
            torch.sum(value, 0, out=metrics[name])
        return sums

    def _add(self, group: _Group, sums: Tensor, finite: bool) -> Tensor:
        """Add a group. sums: of all its clients; used if they are `finite`."""
        finite_K = torch.ones_like(group.weight, dtype=torch.bool)
        counting = group
        if not finite:
            finite_K = _finite(group)
            whole = group.only(finite_K).double()
            sums, counting = self._sum(whole), group if self._bounded else whole
        self._summed += sums
        self.weight += counting.weight.sum(dtype=torch.float64)
        self.contributors += len(finite_K) if finite else finite_K.sum()
        return finite_K


class _Group(NamedTuple):
    """Reports, metrics, kept states and weights of a few clients, (K, …) each. factor: for the reports."""

    report: Report
    metrics: Mapping[str, Tensor]
    kept: ClientState
    weight: Tensor
    factor: Tensor

    def double(self) -> _Group:
        """The same in float64."""
        return self._each(Tensor.double)

    def only(self, rows: slice | Tensor) -> _Group:
        """These of the clients."""
        return self._each(lambda values: values[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> _Group:
        vectors = (self.report, self.metrics, self.kept)
        report, metrics, kept = ({name: change(value) for name, value in part.items()} for part in vectors)
        return _Group(report, metrics, kept, change(self.weight), change(self.factor))


def _within(report_K: Report, clip: Tensor) -> Tensor:
    """The factors (K,), at most 1, that scale reports down to an l2 norm of at most `clip`."""
    norms = [torch.linalg.vector_norm(value, dim=-1, dtype=torch.float64) for value in report_K.values()]
    factors_K: Tensor = clip / torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return factors_K.clamp(max=1).float()


def _total(sums: Tensor, kept_K: ClientState) -> Tensor:
    total = sums.sum()
    for value in kept_K.values():
        total = total + value.sum()
    return total


def _finite(group: _Group) -> Tensor:
    """Whether all values of a client are finite, bool (K,)."""
    weighted = (value * group.weight[:, None] for value in group.report.values())
    everything = (*weighted, *group.metrics.values(), *group.kept.values())
    return torch.stack([torch.isfinite(value).all(-1) for value in everything]).all(0)


# The approximate number of blocks of a cohort on the CPU.
BLOCKS = 32


@dataclass(frozen=True, slots=True)
class Client:
    """A client in a round: its index in the population, and the key of its random streams."""

    index: int
    key: StreamKey


class ClientTrainer(Protocol):
    """A trainer of a population's clients: an engine's part of a round."""

    def train(self, number: int, broadcast: Mapping[str, Tensor], clients: Sequence[Client], sums: RoundSums) -> None:
        """Run the trip of round `number` for every client, longest first, and add their reports to `sums`.

        broadcast: the vectors that they receive. Raises EngineError or ExportError when the model does not run.
        """


def blocks(clients: Sequence[Client], at_once: int) -> list[Sequence[Client]]:
    """The cohort in blocks, each with one or more groups of `at_once` clients that train together.

    Each block has its own sums, which are added in order, so that rounding does not depend on where a block is trained.
    """
    groups = -(-len(clients) // min(at_once, len(clients)))
    size = at_once * -(-groups // BLOCKS)
    return [clients[start : start + size] for start in range(0, len(clients), size)]


def dealt(clients: Sequence[Client], hands: int) -> list[Sequence[Client]]:
    """The cohort, longest first, divided among `hands` GPUs, with equally many and equally long clients for each."""
    return [clients[hand::hands] for hand in range(min(hands, len(clients)))]
