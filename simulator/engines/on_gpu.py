"""A trainer on a GPU, for a process whose vectors are on the host: it copies them there, and the sums back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from simulator.engines.clients import Client, ClientTrainer
from simulator.engines.sums import RoundSums


class OnGpu:
    """Trains on a compute device with vectors from the host."""

    def __init__(self, trainer: ClientTrainer, device: torch.device) -> None:
        self._trainer, self._device = trainer, device

    def train(self, number: int, broadcast: Mapping[str, Tensor], clients: Sequence[Client], sums: RoundSums) -> None:
        """Run a trip for every client: see ClientTrainer."""
        there = RoundSums(sums.layout, torch.empty_like(sums.vector, device=self._device))
        received = {name: vector.to(self._device) for name, vector in broadcast.items()}
        self._trainer.train(number, received, clients, there)
        sums.vector.copy_(there.vector)
