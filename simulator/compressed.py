"""Compressed reports in the engine: the mean that the coordinator decodes, instead of the exact one.

Codecs are linear, so they are applied once, to the mean. Rounding is not. So if reports are quantised or masked, every
client trains by itself. Its report is encoded, rounded with the random numbers of its device, and added up as the
coordinator does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from fedcore.batching import StreamKey
from fedcore.codecs import RoundKey, decode, encode
from fedcore.compression import Compression, dequantise, quantise
from fedcore.params import Float32, ParamSchema
from fedcore.report import WEIGHT, ReportLayout, Segment
from fedcore.schedule import Range, Weighting
from simulator.engines.sums import Client, RoundSums
from simulator.engines.workers.processes import Blocks

Train = Callable[[Blocks], RoundSums]
"""Trains the blocks of a cohort in a round, and gives their sums."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The server's result of a round: the mean report, its weight, sums of metrics by pass, the number of clients."""

    mean: dict[str, Tensor]
    weight: float
    metrics: dict[str, Tensor]
    contributors: int


class ReportSum(Protocol):
    """A sum of reports, each of which is rounded as it travels."""

    def add(self, values_V: Float32, weight: float, key: StreamKey) -> None:
        """Add the unweighted values (V,) of a device. key: of its random streams."""

    def total(self, key: RoundKey) -> NDArray[np.float64]:
        """The summed report, decoded: (L,). At least one must have been added."""


Begin = Callable[[ReportLayout, int], ReportSum]
"""Begins the sum of a round, of reports that travel in a layout."""


class QuantisedSum:
    """The sum of reports that are quantised in the clear."""

    def __init__(self, layout: ReportLayout, number: int) -> None:
        self._layout, self._total_L = layout, np.zeros(layout.size)

    def add(self, values_V: Float32, weight: float, key: StreamKey) -> None:
        """Add the unweighted values (V,) of a device. key: of its random streams."""
        uploaded = quantise(self._layout, self._layout.weigh(values_V, weight), key)
        self._total_L += dequantise(memoryview(uploaded), self._layout)

    def total(self, key: RoundKey) -> NDArray[np.float64]:
        """The summed report, decoded: (L,)."""
        return self._layout.decode(self._total_L, key)


@dataclass(frozen=True, slots=True)
class CompressedReports:
    """A compression for a model of a schema, with the random numbers of a seed.

    weighting: of devices. masked: begins the sums of secure rounds; None sums reports in the clear.
    """

    compression: Compression
    schema: ParamSchema
    seed: int
    weighting: Weighting
    masked: Begin | None = None

    def collect(self, number: int, train: Train, blocks: Blocks) -> Collected:
        """Train the cohort of round `number` and collect its reports; empty without contributors. Raises as `train`."""
        begin = self.masked or (QuantisedSum if self.compression.bits else None)
        if begin is not None:
            return self._one_by_one(number, train, [client for block in blocks for client in block], begin)
        sums = train(blocks)
        contributors, key = int(sums.contributors), RoundKey(self.seed, number)
        mean = {name: value / sums.weight for name, value in sums.report.items()} if contributors else {}
        for index, (name, value) in enumerate(mean.items()):
            chain = () if name in sums.layout.ranges else self.compression.codecs(value.numel(), self.schema)
            if chain:
                coded = encode(chain, value.cpu().numpy(), key, index)
                mean[name] = torch.from_numpy(decode(chain, coded, value.numel(), key, index)).to(value.device)
        return Collected(mean, float(sums.weight), sums.metrics, contributors)

    def _one_by_one(self, number: int, train: Train, clients: Sequence[Client], begin: Begin) -> Collected:
        """As `collect`, with every report on its own."""
        metrics: dict[str, Tensor] = {}
        summed: ReportSum | None = None
        key, contributors = RoundKey(self.seed, number), 0
        for client in clients:
            alone = train([[client]])
            weight = float(alone.weight)
            if not weight:
                continue
            layout = self.layout({name: value.numel() for name, value in alone.report.items()}, alone.layout.ranges)
            summed = summed or begin(layout, number)
            mean = {name: (value / weight).float().cpu().numpy() for name, value in alone.report.items()}
            summed.add(layout.concatenate(layout.encode(mean, key), weight), weight, client.key)
            metrics = {name: value + metrics.get(name, 0) for name, value in alone.metrics.items()}
            contributors += int(alone.contributors)
        if summed is None:
            return Collected({}, 0.0, {}, 0)
        parts = layout.decoded.split(summed.total(key))
        means = {name: torch.from_numpy(parts[name]).to(value.device) for name, value in alone.report.items()}
        return Collected(means, float(parts[WEIGHT][0]), metrics, contributors)

    def layout(self, sizes: Mapping[str, int], ranges: Mapping[str, Range]) -> ReportLayout:
        """The layout of a report as it travels, but for its metrics. sizes, ranges: of its vectors, by name."""
        segments = [Segment(name, size, "mean", range=ranges.get(name, UNSET)) for name, size in sizes.items()]
        whole = ReportLayout((*segments, Segment(WEIGHT, 1, "sum")), self.weighting)
        return self.compression.coded(whole, self.schema)
