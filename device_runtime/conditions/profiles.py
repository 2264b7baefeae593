"""Synthetic conditions, for emulated devices and tests. They depend only on their arguments and the clock."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from device_runtime.errors import ConfigError
from fedcore.conditions import Conditions, ConditionSource
from fedcore.decoding import decoder
from fedcore.errors import why

_TRACE = decoder(tuple[tuple[float, Conditions], ...])

TimeSource = Callable[[], float]
"""Seconds since any fixed time."""

PLENTY = 1 << 40
UP = Conditions(
    charging=True,
    idle=True,
    unmetered=True,
    battery=1.0,
    free_storage_bytes=PLENTY,
    free_memory_bytes=PLENTY,
    thermal_headroom_c=30.0,
)
DOWN = msgspec.structs.replace(UP, charging=False, idle=False, unmetered=False, battery=0.5)
# Each stretch of flapping is drawn at once and independently, so that a reading need not replay all earlier time.
CYCLES = 32
SHORTEST_S, LONGEST_S = 1e-3, 1e9


def constant(conditions: Conditions) -> ConditionSource:
    """A source whose conditions never change."""
    return lambda: conditions


def trace(entries: Path | Sequence[tuple[float, Conditions]], clock: TimeSource = time.monotonic) -> ConditionSource:
    """A source that repeats a list of (seconds, conditions), beginning at the clock's zero.

    A file holds them as JSON: `[[3600, {"charging": true}], [1800, {"charging": false}]]`. Raises ConfigError when it
    cannot be read or is malformed, has no entries, or has one without a duration.
    """
    steps = _read(entries) if isinstance(entries, Path) else tuple(entries)
    for index, (seconds, _) in enumerate(steps):
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ConfigError(f"entry {index} of the trace lasts {seconds} seconds; give it more than 0")
    if not steps:
        raise ConfigError("the trace has no entries")
    whole = sum(seconds for seconds, _ in steps)

    def read() -> Conditions:
        remaining = clock() % whole
        for seconds, conditions in steps:
            remaining -= seconds
            if remaining < 0:
                return conditions
        return steps[-1][1]

    return read


def flapping(seed: int, up_s: float, down_s: float, clock: TimeSource = time.monotonic) -> ConditionSource:
    """A source that alternates between good and bad conditions, which last `up_s` and `down_s` seconds on average.

    Both times are exponentially distributed. Readings depend only on seed and clock, not on earlier readings.
    Raises ConfigError when a time is below a millisecond or beyond 1e9 seconds.
    """
    if not all(SHORTEST_S <= seconds <= LONGEST_S for seconds in (up_s, down_s)):
        raise ConfigError(
            f"conditions that flap need times above 0, of {SHORTEST_S:g} to {LONGEST_S:g} seconds, "
            f"not {up_s} and {down_s} seconds"
        )
    stretch_s = CYCLES * (up_s + down_s)

    def read() -> Conditions:
        stretch, remaining = divmod(clock(), stretch_s)
        rng = random.Random(f"{seed} {stretch:.0f}")
        up = rng.random() < up_s / (up_s + down_s)
        while (remaining := remaining - rng.expovariate(1 / (up_s if up else down_s))) >= 0:
            up = not up
        return UP if up else DOWN

    return read


def _read(path: Path) -> tuple[tuple[float, Conditions], ...]:
    try:
        return _TRACE.decode(path.read_bytes())
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"the trace of conditions {path} cannot be used: {why(error)}") from error
