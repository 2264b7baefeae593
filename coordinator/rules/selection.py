"""Selection: who may take part in a task, and who is drawn. Pure: the random source is an argument."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from coordinator.rules.eligibility import Requires
from fedcore.conditions import StatedConditions, rounded_down
from fedcore.wire.messages import CheckIn

T = TypeVar("T")
LATE_ROUNDS = 20
"""A device that let a deadline pass is late, and drawn last, for this many committed rounds."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The statements of a device at check-in: formats that it runs, examples per collection, its machine's state.

    examples: rounded down to powers of two. version: of its runtime; memory_mb: of the machine, in MiB, None when it
    did not say.
    """

    formats: frozenset[str]
    examples: Mapping[str, int]
    version: str = ""
    memory_mb: int | None = None
    conditions: StatedConditions = field(default_factory=StatedConditions)

    @classmethod
    def stated_by(cls, message: CheckIn) -> Capabilities:
        """The capabilities in a check-in."""
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
    """The needs of a task: a device has one of `formats`, `min_examples` in `collection`, and meets `requires`."""

    formats: frozenset[str]
    collection: str
    min_examples: int
    requires: Requires = field(default_factory=Requires)

    def unmet_by(self, device: Capabilities) -> str:
        """The obstacle for a device, one of progress.OBSTACLES, or "". It is "format" only when nothing else is one.

        A device that may hold enough examples passes: whether it does, it checks itself before it waits.
        """
        if device.examples.get(self.collection, 0) < rounded_down(self.min_examples):
            return "examples"
        unmet = self.requires.unmet_by(device.version, device.memory_mb, device.conditions)
        return unmet or ("format" if self.formats.isdisjoint(device.formats) else "")


@dataclass(frozen=True, slots=True)
class Eligibility:
    """The eligibility of one device for tasks, by its check-in. Each task is judged once, however often it is asked.

    Neither the needs of a task nor the capabilities that a device stated ever change.
    """

    capabilities: Capabilities
    _obstacles: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, message: CheckIn) -> Eligibility:
        """The eligibility of a device that sent this."""
        return cls(Capabilities.stated_by(message))

    def only(self, tasks: Iterable[Needs]) -> Eligibility:
        """The same with only the statements that these tasks ask for: a device that waits must not cost memory."""
        asked, able = tuple(tasks), self.capabilities
        held = {
            needs.collection: able.examples[needs.collection] for needs in asked if needs.collection in able.examples
        }
        formats = able.formats & frozenset().union(*(needs.formats for needs in asked))
        return Eligibility(replace(able, formats=formats, examples=held), self._obstacles)

    def obstacle(self, task: str, needs: Needs) -> str:
        """The obstacle for the task with this id and these needs; "" for none."""
        if task not in self._obstacles:
            self._obstacles[task] = needs.unmet_by(self.capabilities)
        return self._obstacles[task]


def formats_wanted(judged: Iterable[tuple[Needs, str]]) -> frozenset[str]:
    """The formats of the tasks that a device could serve but for its formats, from each task's needs and obstacle."""
    return frozenset().union(*(needs.formats for needs, obstacle in judged if obstacle == "format"))


def draw(waiting: Sequence[T], count: int, source: random.Random) -> list[T]:
    """`count` of the waiting, every subset and order equally likely: a fast phone has no advantage."""
    return source.sample(waiting, count)
