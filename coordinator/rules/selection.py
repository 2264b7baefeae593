"""Who may take part in a task, and who is drawn. Pure: the random source is an argument."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from coordinator.rules.eligibility import Requires
from fedcore.wire.messages import CheckIn, StatedConditions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device said at check-in: formats that it runs, examples that it holds per collection, and of itself.

    version: of its runtime; memory_mb: of the machine, in MiB, None when it did not say.
    """

    formats: frozenset[str]
    examples: Mapping[str, int]
    version: str = ""
    memory_mb: int | None = None
    conditions: StatedConditions = field(default_factory=StatedConditions)

    @classmethod
    def stated_by(cls, message: CheckIn) -> Capabilities:
        """Those of a device that sent this."""
        able = message.capabilities
        return cls(
            formats=frozenset(able.formats),
            examples=message.examples,
            version=able.version,
            memory_mb=able.memory_mb,
            conditions=message.conditions or StatedConditions(),
        )


@dataclass(frozen=True, slots=True)
class Needs:
    """What a task asks of a device: one of `formats`, `min_examples` in `collection`, and what `requires` says."""

    formats: frozenset[str]
    collection: str
    min_examples: int
    requires: Requires = field(default_factory=Requires)

    def met_by(self, device: Capabilities) -> bool:
        """Whether a device may take part."""
        return not self.unmet_by(device)

    def unmet_by(self, device: Capabilities) -> str:
        """What keeps a device out, one of progress.OBSTACLES; a format only when it lacks nothing else."""
        if device.examples.get(self.collection, 0) < self.min_examples:
            return "examples"
        unmet = self.requires.unmet_by(device.version, device.memory_mb, device.conditions)
        return unmet or ("format" if self.formats.isdisjoint(device.formats) else "")


def formats_wanted(offers: Iterable[Needs], device: Capabilities) -> frozenset[str]:
    """What a device would have to run to serve one of the tasks that it could otherwise serve; empty without such."""
    return frozenset().union(*(needs.formats for needs in offers if needs.unmet_by(device) in ("", "format")))


def draw(waiting: Sequence[T], count: int, source: random.Random) -> list[T]:
    """`count` of the waiting, every subset and order equally likely, so that a fast phone is not favoured."""
    return source.sample(waiting, count)
