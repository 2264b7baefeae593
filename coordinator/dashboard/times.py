"""Times as pages show them."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60))


def clock(at: float) -> str:
    """A time, in seconds since 1970, as one of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def date(at: float) -> str:
    """A time, in seconds since 1970, as a date and a time of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(seconds: float) -> str:
    """A duration in its largest unit of days, hours, minutes or seconds."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
