"""Compressed reports in the engine: what the coordinator decodes of a round, in the place of its exact mean.

Codecs are linear, so they are applied once, to the mean. Quantisation is not: with it every client trains alone, and
its report is encoded, rounded with the random numbers of its device, and decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcore.codecs import decode, encode
from fedcore.codecs.codec import RoundKey
from fedcore.codecs.compression import Compression
from fedcore.params import ParamSchema
from fedcore.quantisation import dequantise, quantise
from fedcore.report import WEIGHT, ReportLayout, Segment
from simulator.engines.clients import Client
from simulator.engines.processes import Blocks
from simulator.engines.sums import RoundSums

Train = Callable[[Blocks], RoundSums]
"""Trains the blocks of a cohort in a round, and gives their sums."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What the server has of a round: the mean report, its weight, sums of metrics by pass, and how many clients."""

    mean: dict[str, Tensor]
    weight: float
    metrics: dict[str, Tensor]
    contributors: int


@dataclass(frozen=True, slots=True)
class CompressedReports:
    """A compression for a model of a schema, with the random numbers of a seed."""

    compression: Compression
    schema: ParamSchema
    seed: int

    def collect(self, number: int, train: Train, blocks: Blocks) -> Collected:
        """Train the cohort of round `number`, and collect its reports; none of no contributor. Raises as `train`."""
        if self.compression.bits:
            return self._one_by_one(number, train, [client for block in blocks for client in block])
        sums = train(blocks)
        contributors, key = int(sums.contributors), RoundKey(self.seed, number)
        mean = {name: value / sums.weight for name, value in sums.report.items()} if contributors else {}
        for index, (name, value) in enumerate(mean.items()):
            if chain := self.compression.codecs(value.numel(), self.schema):
                coded = encode(chain, value.cpu().numpy(), key, index)
                mean[name] = torch.from_numpy(decode(chain, coded, value.numel(), key, index)).to(value.device)
        return Collected(mean, float(sums.weight), sums.metrics, contributors)

    def _one_by_one(self, number: int, train: Train, clients: Sequence[Client]) -> Collected:
        """As `collect`, with every report on its own."""
        metrics: dict[str, Tensor] = {}
        key, total_L, contributors = RoundKey(self.seed, number), np.zeros(0), 0
        for client in clients:
            alone = train([[client]])
            if not int(alone.contributors):
                continue
            layout, weight = self._layout(alone), float(alone.weight)
            mean = {name: (value / weight).float().cpu().numpy() for name, value in alone.report.items()}
            report_L = layout.weigh(layout.concatenate(layout.encode(mean, key), weight), weight)
            decoded_L = dequantise(memoryview(quantise(layout, report_L, client.key)), layout)
            total_L = total_L + decoded_L if contributors else decoded_L.astype(np.float64)
            metrics = {name: value + metrics.get(name, 0) for name, value in alone.metrics.items()}
            contributors += 1
        if not contributors:
            return Collected({}, 0.0, {}, 0)
        parts = layout.decoded.split(layout.decode(total_L, key))
        device = next(iter(alone.report.values())).device
        means = {name: torch.from_numpy(parts[name]).to(device) for name in alone.report}
        return Collected(means, float(parts[WEIGHT][0]), metrics, contributors)

    def _layout(self, sums: RoundSums) -> ReportLayout:
        segments = [Segment(name, value.numel(), "mean") for name, value in sums.report.items()]
        return self.compression.coded(ReportLayout((*segments, Segment(WEIGHT, 1, "sum")), "examples"), self.schema)
