"""Clients of a cohort, and the contract of what trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedcore.batching import StreamKey
from simulator.engines.sums import RoundSums

# On the CPU a cohort is divided into about so many blocks.
BLOCKS = 32


@dataclass(frozen=True, slots=True)
class Client:
    """A client in a round: its index in the population, and the key of its random streams."""

    index: int
    key: StreamKey


class ClientTrainer(Protocol):
    """What trains clients of a population: an engine's part of a round."""

    def train(self, number: int, broadcast: Mapping[str, Tensor], clients: Sequence[Client], sums: RoundSums) -> None:
        """Run the trip of round `number` for every client, longest first, and add what they report to `sums`.

        broadcast: the vectors that they receive. Raises EngineError or ExportError when the model does not run.
        """


def blocks(clients: Sequence[Client], at_once: int) -> list[Sequence[Client]]:
    """The cohort in blocks, each of one or more groups of clients that are trained together, `at_once` of them.

    A block has sums of its own, and those are added in order, so that no rounding depends on who trains which block.
    """
    size = block_size(len(clients), at_once)
    return [clients[start : start + size] for start in range(0, len(clients), size)]


def block_size(cohort: int, at_once: int) -> int:
    """How many clients are in a block, if there are so many."""
    groups = -(-cohort // min(at_once, cohort))
    return at_once * -(-groups // BLOCKS)


def dealt(clients: Sequence[Client], hands: int) -> list[Sequence[Client]]:
    """The cohort, longest first, dealt to so many GPUs: each gets as many clients, and as long ones, as the others."""
    return [clients[hand::hands] for hand in range(min(hands, len(clients)))]
