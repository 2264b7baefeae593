"""Who may take part in a task, and who is drawn. Pure: the random source is an argument."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device said at check-in: formats that it runs, examples that it holds per collection."""

    formats: frozenset[str]
    examples: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a task asks of a device: one of `formats`, and `min_examples` in `collection`."""

    formats: frozenset[str]
    collection: str
    min_examples: int

    def met_by(self, device: Capabilities) -> bool:
        """Whether a device may take part."""
        holds = device.examples.get(self.collection, 0)
        return holds >= self.min_examples and not self.formats.isdisjoint(device.formats)


def draw(waiting: Sequence[T], count: int, source: random.Random) -> list[T]:
    """`count` of the waiting, every subset and order equally likely, so that a fast phone is not favoured."""
    return source.sample(waiting, count)
