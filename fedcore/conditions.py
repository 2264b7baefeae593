"""Conditions of a device, and the rules on them that a task or a device's owner sets: defined and evaluated here only.

Their meaning: docs/device.md. How a device states them: docs/spec/wire.md §2. If a rule needs a condition that is
unknown, the rule does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from fedcore.validation import Count, Fraction, NotNegative, build, check, checked, setting

MEBIBYTE = 1 << 20


class _Checked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values that are checked in every constructor. Raises ValueError naming the wrong one."""

    def __post_init__(self) -> None:
        check(self)


class StatedConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that a device tells a coordinator; None means unknown.

    `battery` is a fraction, to a tenth; `free_storage_mb` is in MiB, rounded down to a power of two.
    """

    charging: bool | None = None
    idle: bool | None = None
    unmetered: bool | None = None
    battery: Fraction | None = None
    free_storage_mb: Count | None = None

    @property
    def free_storage_bytes(self) -> int | None:
        """The free storage in bytes."""
        return None if self.free_storage_mb is None else self.free_storage_mb * MEBIBYTE


@checked(ValueError)
class Conditions(_Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reading of a device; None means unknown. Raises ValueError when a value is impossible.

    `charging`: on external power. `idle`: other programs hardly use the processors. `unmetered`: bytes on the network
    cost nothing. `battery` is a fraction, `thermal_headroom_c` the degrees Celsius left until the device slows down.
    """

    charging: bool | None = None
    idle: bool | None = None
    unmetered: bool | None = None
    battery: Fraction | None = None
    free_storage_bytes: Count | None = None
    free_memory_bytes: Count | None = None
    thermal_headroom_c: float | None = None

    def stated(self) -> StatedConditions:
        """The part that a coordinator is told. Levels are rounded: exact ones would help to recognise a device."""
        storage = self.free_storage_bytes
        return StatedConditions(
            charging=self.charging,
            idle=self.idle,
            unmetered=self.unmetered,
            battery=None if self.battery is None else round(self.battery, 1),
            free_storage_mb=None if storage is None else rounded_mb(storage),
        )


ConditionSource = Callable[[], Conditions]
"""Reads the current conditions. A host application may give its own, if it knows more than the operating system."""


class ConditionRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules on conditions that a task may set; by default there are none. `min_<name>` bounds `<name>` from below."""

    charging: Annotated[bool, setting("The device must be on external power.")] = False
    idle: Annotated[bool, setting("Other programs must hardly use its processors.")] = False
    unmetered: Annotated[bool, setting("Bytes on its network must cost nothing.")] = False
    min_battery: Annotated[Fraction, setting("Least charge of its battery, as a fraction.")] | None = None
    min_free_storage_bytes: Annotated[Count, setting("Least free storage.", unit="bytes")] | None = None

    def unmet(self, conditions: Conditions | StatedConditions) -> tuple[str, ...]:
        """The reasons, in words, for which rules do not hold; empty when all do."""
        return (*self._unmet_flags(conditions), *self._unmet_minima(conditions))

    def _unmet_flags(self, conditions: Conditions | StatedConditions) -> Iterator[str]:
        for name, (otherwise, question) in _FLAGS.items():
            if getattr(self, name) and not (value := getattr(conditions, name)):
                yield f"unknown: {question}" if value is None else otherwise

    def _unmet_minima(self, conditions: Conditions | StatedConditions) -> Iterator[str]:
        for name, (noun, words) in _MINIMA.items():
            # Some rule sets and some readings lack some of these names.
            least, value = getattr(self, f"min_{name}", None), getattr(conditions, name, None)
            if least is not None and (value is None or value < least):
                yield f"unknown: {noun}" if value is None else f"{noun} {words(value)} is below {words(least)}"


@checked(ValueError)
class Requirements(ConditionRules, _Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules that a device's owner sets: what must hold for the device to train. By default nothing.

    Leave out the rule for a condition that the machine cannot report. Raises ValueError when a value is impossible.
    """

    min_free_memory_bytes: Annotated[Count, setting("Least free memory.", unit="bytes")] | None = None
    min_thermal_headroom_c: (
        Annotated[NotNegative, setting("Least headroom until the device slows down.", unit="degrees Celsius")] | None
    ) = None


def to_requirements(given: Mapping[str, Any]) -> Requirements:
    """Requirements from their names and values, as they are or in words. Raises ValueError."""
    return build(Requirements, given, text=True)


def rounded_mb(size_bytes: int) -> int:
    """MiB, rounded down to a power of two: an exact size would help to recognise a device."""
    return rounded_down(size_bytes // MEBIBYTE)


def rounded_down(count: int) -> int:
    """The greatest power of two that is at most `count`; 0 for 0. Larger counts never round to smaller ones."""
    return 1 << (count.bit_length() - 1) if count else 0


_FLAGS = {
    "charging": ("not charging", "charging or not"),
    "idle": ("in use", "in use or not"),
    "unmetered": ("the network is metered", "network metered or not"),
}
_MINIMA: dict[str, tuple[str, Callable[[float], str]]] = {
    "battery": ("battery", lambda fraction: f"{100 * fraction:.0f} %"),
    "free_storage_bytes": ("free storage", lambda size: f"{size / 1e6:,.0f} MB"),
    "free_memory_bytes": ("free memory", lambda size: f"{size / 1e6:,.0f} MB"),
    "thermal_headroom_c": ("thermal headroom", lambda celsius: f"{celsius:.0f} °C"),
}
