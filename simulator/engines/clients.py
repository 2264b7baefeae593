"""Clients of a cohort, and the contract of their trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedcore.batching import StreamKey
from simulator.engines.sums import RoundSums

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
    size = block_size(len(clients), at_once)
    return [clients[start : start + size] for start in range(0, len(clients), size)]


def block_size(cohort: int, at_once: int) -> int:
    """The number of clients in a full block."""
    groups = -(-cohort // min(at_once, cohort))
    return at_once * -(-groups // BLOCKS)


def dealt(clients: Sequence[Client], hands: int) -> list[Sequence[Client]]:
    """The cohort, longest first, divided among `hands` GPUs, with equally many and equally long clients for each."""
    return [clients[hand::hands] for hand in range(min(hands, len(clients)))]
