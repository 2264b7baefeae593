"""Counts of check-ins by the versions of models that devices state. A device may state what is not so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from msgspec import UNSET

from coordinator.tally import Tally
from fedcore.wire.messages import CheckIn

DAY_S = 86_400
_MOST = 10_000
"""Keys between two writes: devices may state anything, and only released versions are written."""


class Stated(NamedTuple):
    """What a check-in of a population stated of a model: the version in use, or refused; day: UTC, since 1970."""

    population: str
    name: str
    number: int
    day: int
    refused: bool


ModelCounts: TypeAlias = Mapping[Stated, int]


class ModelTally(Tally[Stated]):
    """Counts that have not been written yet."""

    def __init__(self) -> None:
        super().__init__(_MOST)

    def count(self, population: str, message: CheckIn, now: float) -> None:
        """Count what a check-in states, at a time in seconds since 1970."""
        if message.models is UNSET and message.refused is UNSET:
            return
        day = int(now // DAY_S)
        stated = ((message.models or {}, False), (message.refused or {}, True))
        self.add(
            Stated(population, name, number, day, refused)
            for numbers, refused in stated
            for name, number in numbers.items()
        )
