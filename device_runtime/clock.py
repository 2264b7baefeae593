"""Time that survives restarts: the wall clock, which may jump, and the time since boot, which does not."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fedcore.validation import decoder


def _seconds_since_boot() -> float:
    # Time asleep counts too, if the system can measure it.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return secrets.token_hex(16)  # unique to this process, so between processes the wall clock counts


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since 1970 by the wall clock, seconds since boot, and a name for this boot."""

    wall: Callable[[], float] = time.time
    since_boot: Callable[[], float] = _seconds_since_boot
    boot: str = field(default_factory=_boot)


class Moment(msgspec.Struct, frozen=True):
    """A time in the future that can be stored: `length_s` seconds after its creation."""

    wall: float
    since_boot: float
    boot: str
    length_s: float

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> Moment:
        """The moment `seconds` from now."""
        return cls(clock.wall() + seconds, clock.since_boot() + seconds, clock.boot, seconds)

    def carried_over(self, clock: Clock) -> Moment:
        """The same moment on the clock of this boot, so that later changes of the wall clock do not move it."""
        return self if self.boot == clock.boot else Moment.after(self.remaining_s(clock), clock)

    def remaining_s(self, clock: Clock) -> float:
        """Seconds until then, 0 to `length_s`. Exact within one boot; after a reboot, never above the original."""
        remaining = self.since_boot - clock.since_boot() if self.boot == clock.boot else self.wall - clock.wall()
        return max(min(remaining, self.length_s), 0.0)


MOMENT = decoder(Moment)
