"""What a task asks of a device: what the device must say of itself, and what it checks alone and tells nobody. Pure.

Spec: docs/spec/rounds.md §6. What a rule wants and a device does not know, or does not say, does not hold.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from coordinator.errors import InvalidTask
from fedcore.wire.messages import StatedConditions

_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_LONGEST_RELEASE = 100
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions that must hold. min_battery: a fraction. Raises InvalidTask naming the rule and what it may be."""

    charging: bool = False
    idle: bool = False
    unmetered: bool = False
    min_battery: float | None = None
    min_free_storage_bytes: int | None = None

    def __post_init__(self) -> None:
        demand(_within(self.min_battery, 0, 1), "min_battery", "from 0 to 1", self.min_battery)
        least = self.min_free_storage_bytes
        demand(_within(least, 0, 2**63 - 1), "min_free_storage_bytes", "a number of bytes", least)

    def hold(self, stated: StatedConditions) -> bool:
        """Whether they hold, by what a device said."""
        wanted = ((self.charging, stated.charging), (self.idle, stated.idle), (self.unmetered, stated.unmetered))
        storage = None if stated.free_storage_mb is None else stated.free_storage_mb * _MEBIBYTE
        return (
            all(holds for want, holds in wanted if want)
            and _reaches(stated.battery, self.min_battery)
            and _reaches(storage, self.min_free_storage_bytes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Requires(Conditions):
    """What a device must say of itself at check-in. min_version: of its runtime, as numbers with points between.

    Raises InvalidTask naming the rule and what it may be.
    """

    min_version: str | None = None
    min_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        # `super()` without arguments knows the class from before `slots` made another of it.
        Conditions.__post_init__(self)
        given = self.min_version
        told = given is None or (len(given) <= _LONGEST_RELEASE and bool(_RELEASE.fullmatch(given)))
        wording = f"numbers with points between, in {_LONGEST_RELEASE} characters at most"
        demand(told, "min_version", wording, given)
        least = self.min_memory_bytes
        demand(_within(least, 0, 2**63 - 1), "min_memory_bytes", "a number of bytes", least)

    def unmet_by(self, version: str, memory_mb: int | None, stated: StatedConditions) -> str:
        """What keeps a device of that runtime version and memory out, by what it said; "" when nothing does."""
        memory = None if memory_mb is None else memory_mb * _MEBIBYTE
        if self.min_version is not None and _release(version) < _release(self.min_version):
            return "version"
        if not _reaches(memory, self.min_memory_bytes):
            return "memory"
        return "" if self.hold(stated) else "conditions"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice(Conditions):
    """What a device checks alone, before it waits for a task. By default it checks nothing.

    min_examples: in the plan's collection; max_example_age_s: those count that are no older. Raises InvalidTask naming
    the rule and what it may be.
    """

    min_examples: int = 0
    max_example_age_s: float | None = None

    def __post_init__(self) -> None:
        Conditions.__post_init__(self)
        demand(_within(self.min_examples, 0, 2**63 - 1), "min_examples", "a number of examples", self.min_examples)
        age = self.max_example_age_s
        demand(age is None or 0 < age < math.inf, "max_example_age_s", "a finite number of seconds above 0", age)
        counted = age is None or self.min_examples > 0
        demand(counted, "min_examples", "at least 1 with max_example_age_s", self.min_examples)


def demand(met: bool, name: str, wording: str, value: object) -> None:
    """Raise InvalidTask, naming a setting and what it may be, unless `met`."""
    if not met:
        raise InvalidTask(f"{name} must be {wording}, not {value!r}")


def _within(value: float | None, least: float, most: float) -> bool:
    return value is None or least <= value <= most


def _reaches(stated: float | None, least: float | None) -> bool:
    return least is None or (stated is not None and stated >= least)


@lru_cache(maxsize=256)  # at every check-in the same rule, and of many devices the same few releases
def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, so that they compare; none of them for one without."""
    found = _RELEASE.match(version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
