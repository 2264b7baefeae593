"""Rules of a task on devices: on what a device states, and those that only the device checks, telling nobody. Pure.

Spec: docs/spec/rounds.md §6. What conditions are, and whether they hold: fedcore/conditions.py.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from coordinator.errors import InvalidTask
from fedcore.conditions import MEBIBYTE, ConditionRules, StatedConditions

_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_LONGEST_RELEASE = 100


class _TaskRules(ConditionRules, frozen=True, kw_only=True):
    """Rules on conditions, as a task's settings. Their bounds are checked here, so that the error is InvalidTask."""

    min_battery: float | None = None
    min_free_storage_bytes: int | None = None

    def __post_init__(self) -> None:
        demand(_within(self.min_battery, 0, 1), "min_battery", "from 0 to 1", self.min_battery)
        least = self.min_free_storage_bytes
        demand(_within(least, 0, 2**63 - 1), "min_free_storage_bytes", "a number of bytes", least)


class Requires(_TaskRules, frozen=True, kw_only=True):
    """Rules on what a device states at check-in.

    min_version: of its runtime, as numbers with points between. min_memory_bytes: of all its memory.

    Raises InvalidTask naming the rule and what it may be.
    """

    min_version: str | None = None
    min_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.min_version
        told = given is None or (len(given) <= _LONGEST_RELEASE and bool(_RELEASE.fullmatch(given)))
        wording = f"numbers with points between, in {_LONGEST_RELEASE} characters at most"
        demand(told, "min_version", wording, given)
        least = self.min_memory_bytes
        demand(_within(least, 0, 2**63 - 1), "min_memory_bytes", "a number of bytes", least)

    def unmet_by(self, version: str, memory_mb: int | None, stated: StatedConditions) -> str:
        """The kind of rule that keeps a device of that runtime version and memory out; "" when all hold."""
        if self.min_version is not None and _release(version) < _release(self.min_version):
            return "version"
        least = self.min_memory_bytes
        if least is not None and (memory_mb is None or memory_mb * MEBIBYTE < least):
            return "memory"
        return "conditions" if self.unmet(stated) else ""


class OnDevice(_TaskRules, frozen=True, kw_only=True):
    """Rules that only the device checks, before it waits for a task. By default there are none.

    min_examples: in the plan's collection. max_example_age_s: only examples count that are no older.

    Raises InvalidTask naming the rule and what it may be.
    """

    min_examples: int = 0
    max_example_age_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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


@lru_cache(maxsize=256)  # at every check-in the same rule, and of many devices the same few releases
def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, so that they compare; none of them for one without."""
    found = _RELEASE.match(version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
