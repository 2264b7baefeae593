"""One reading of a device's conditions, and what must hold of it before the device trains. See docs/device.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec

from device_runtime.validation import checked, misfit
from fedcore.decoding import converter
from fedcore.wire.messages import Fraction, StatedConditions

Size = Annotated[int, msgspec.Meta(ge=0)]
MEBIBYTE = 1 << 20
Degrees = Annotated[float, msgspec.Meta(ge=0)]


class _Checked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values that are checked however they were made. Raises ValueError naming the one that is none."""

    def __post_init__(self) -> None:
        found = misfit(self)
        if found is not None:
            name, value, words = found
            raise ValueError(f"{name} = {value!r}: {words}")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} = {value}: it must be finite")


@checked
class Conditions(_Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reading; None is what the device does not know. Raises ValueError when a value is none that can be read.

    `charging`: on external power. `idle`: others leave the processors alone. `unmetered`: the network costs nothing by
    the byte. `battery` is a fraction, `thermal_headroom_c` the degrees Celsius left until the device slows itself down.
    """

    charging: bool | None = None
    idle: bool | None = None
    unmetered: bool | None = None
    battery: Fraction | None = None
    free_storage_bytes: Size | None = None
    free_memory_bytes: Size | None = None
    thermal_headroom_c: float | None = None

    def stated(self) -> StatedConditions:
        """What a coordinator is told: battery in tenths, as an exact level would help to recognise a device."""
        storage = self.free_storage_bytes
        return StatedConditions(
            charging=self.charging,
            idle=self.idle,
            unmetered=self.unmetered,
            battery=None if self.battery is None else round(self.battery, 1),
            free_storage_mb=None if storage is None else rounded_mb(storage),
        )


ConditionSource = Callable[[], Conditions]
"""Reads the conditions now. A host application that knows more than the operating system tells gives its own."""


@checked
class Requirements(_Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must hold for a device to train; by default nothing. Raises ValueError when a value is none to require.

    What is required must be known to hold: an unknown value fails, and its reason says that it is unknown. On a machine
    that never tells, leave that requirement out.
    """

    charging: bool = False
    idle: bool = False
    unmetered: bool = False
    min_battery: Fraction | None = None
    min_free_storage_bytes: Size | None = None
    min_free_memory_bytes: Size | None = None
    min_thermal_headroom_c: Degrees | None = None

    def unmet(self, conditions: Conditions) -> tuple[str, ...]:
        """Why not to train now, one reason in words for each requirement that does not hold; empty when all do."""
        return (*self._flags(conditions), *self._levels(conditions))

    def _flags(self, now: Conditions) -> Iterator[str]:
        flags = (
            (self.charging, now.charging, "not charging", "charging or not"),
            (self.idle, now.idle, "in use", "in use or not"),
            (self.unmetered, now.unmetered, "the network is metered", "network metered or not"),
        )
        for required, value, otherwise, what in flags:
            if required and not value:
                yield f"unknown: {what}" if value is None else otherwise

    def _levels(self, now: Conditions) -> Iterator[str]:
        levels = (
            ("battery", now.battery, self.min_battery, _percent),
            ("free storage", now.free_storage_bytes, self.min_free_storage_bytes, _megabytes),
            ("free memory", now.free_memory_bytes, self.min_free_memory_bytes, _megabytes),
            ("thermal headroom", now.thermal_headroom_c, self.min_thermal_headroom_c, _degrees),
        )
        for what, value, least, words in levels:
            if least is not None and (value is None or value < least):
                yield f"unknown: {what}" if value is None else f"{what} {words(value)} is below {words(least)}"


to_requirements = converter(Requirements, strict=False)
"""Requirements from their names and values, as they are or in words. Raises msgspec.ValidationError."""


def rounded_mb(size_bytes: int) -> int:
    """MiB, rounded down to a power of two: an exact size would help to recognise a device."""
    whole = size_bytes // MEBIBYTE
    return 1 << (whole.bit_length() - 1) if whole else 0


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"


def _degrees(celsius: float) -> str:
    return f"{celsius:.0f} °C"
