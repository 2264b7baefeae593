"""Time that survives restarts, conditions of a device, requirements on them, and the sources of both."""

from __future__ import annotations

import math
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from device_runtime.errors import ConfigError
from fedcore.conditions import Conditions, ConditionSource, Requirements
from fedcore.errors import why
from fedcore.validation import decoder

# Time that survives restarts: the wall clock, which may jump, and the time since boot, which does not.


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


# Conditions of a device, requirements on them, and the sources of both.


__all__ = ["ConditionSource", "Conditions", "Requirements", "constant", "flapping", "linux", "trace"]


# Others may use this much of all processors while the machine still counts as idle.
IDLE_SHARE = 0.25
# Processor times are compared over at least, and at most, this long.
WINDOW_S = (2.0, 60.0)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Trip points at which the kernel slows the machine down or stops it; others only turn fans.
TRIPS = frozenset({"passive", "hot", "critical"})
# Kinds of link in /sys/class/net/*/type, from if_arp.h: Ethernet; PPP, and the raw IP of modems.
ETHERNET = "1"
DIALLED = frozenset({"512", "519", "530"})


def linux(root: Path = Path("/"), storage: Path = Path()) -> ConditionSource:
    """A source that reads /proc and /sys under `root`, and the free space where `storage` lies.

    Idleness excludes this process's own use, so that training does not end training. It is measured since the last
    reading; the first reading, and one after a minute without any, use the load average.
    """
    idleness = _Idleness(root / "proc")

    def read() -> Conditions:
        """The current conditions; None for what this kernel does not report."""
        charging, battery = _power(root / "sys/class/power_supply")
        return Conditions(
            charging=charging,
            idle=idleness.read(),
            unmetered=_unmetered(root),
            battery=battery,
            free_storage_bytes=_free_storage(storage),
            free_memory_bytes=_free_memory(root / "proc/meminfo"),
            thermal_headroom_c=_headroom(root / "sys/class/thermal"),
        )

    return read


class _Idleness:
    """Whether other programs leave the processors idle. It remembers the last reading."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._before: tuple[float, float] | None = None
        self._idle: bool | None = None

    def read(self) -> bool | None:
        lines = _text(self._proc / "stat").splitlines()
        cores = sum(line.startswith("cpu") for line in lines) - 1
        if cores < 1:
            return None
        total, unused = _ticks(lines[0])
        now = total, total - unused - _own_ticks(self._proc / "self/stat")
        if self._before is not None:
            elapsed, others = (after - before for after, before in zip(now, self._before, strict=True))
            shortest, longest = (seconds * TICKS_PER_S * cores for seconds in WINDOW_S)
            if elapsed < shortest:
                return self._idle
            self._before, self._idle = now, others < IDLE_SHARE * elapsed
            if elapsed <= longest:
                return self._idle
        self._before, self._idle = now, self._by_load(cores)
        return self._idle

    def _by_load(self, cores: int) -> bool | None:
        load = _number(_text(self._proc / "loadavg").partition(" ")[0])
        return None if load is None else load < IDLE_SHARE * cores


def _ticks(line: str) -> tuple[float, float]:
    """Ticks of all processors since boot, and how many of these were idle or waiting for a disk."""
    # Guests, the last two of ten, are counted in user time already.
    counts = [float(word) for word in line.split()[1:9]]
    return sum(counts), sum(counts[3:5])


def _own_ticks(path: Path) -> float:
    # The name of the program, in parentheses, may hold spaces; user and system time are fields 14 and 15.
    fields = _text(path).rpartition(")")[2].split()
    return float(fields[11]) + float(fields[12]) if len(fields) > 12 else 0.0


def _power(folder: Path) -> tuple[bool | None, float | None]:
    """Whether there is external power, and the charge of the battery: the mean over several batteries."""
    # A supply of scope "Device" belongs to a mouse or a headset.
    supplies = [supply for supply in _entries(folder) if _word(supply / "scope") != "Device"]
    batteries = [supply for supply in supplies if _word(supply / "type") == "Battery"]
    states = {_word(battery / "status") for battery in batteries}
    levels = [level for battery in batteries if (level := _number(_word(battery / "capacity"))) is not None]
    online = [on for supply in supplies if supply not in batteries and (on := _word(supply / "online"))]
    charging: bool | None = None
    if states & {"Charging", "Discharging"}:
        charging = "Discharging" not in states
    elif online:
        charging = any(on != "0" for on in online)
    elif states == {"Full"}:
        charging = True
    return charging, min(max(sum(levels) / len(levels) / 100, 0.0), 1.0) if levels else None


def _unmetered(root: Path) -> bool | None:
    """Whether the link of the default route costs nothing: yes for a cable, no for a modem, else unknown."""
    name = _default_link(root / "proc/net")
    if not name:
        return None
    link = root / "sys/class/net" / name
    kind, hints = _word(link / "type"), _text(link / "uevent").splitlines()
    if kind in DIALLED or "DEVTYPE=wwan" in hints:
        return False
    # Wireless may be a phone's hotspot and USB a phone on a cable; tunnels and bridges have no device.
    bus = (link / "device/subsystem").resolve().name
    wired = kind == ETHERNET and os.path.exists(link / "device") and bus != "usb"
    wireless = "DEVTYPE=wlan" in hints or any(os.path.exists(link / mark) for mark in ("wireless", "phy80211"))
    return True if wired and not wireless else None


def _default_link(net: Path) -> str:
    """The interface of the default route, of IPv4 if there is one, with the least metric; empty without any."""
    four = [line.split() for line in _text(net / "route").splitlines()[1:]]
    six = [line.split() for line in _text(net / "ipv6_route").splitlines()]
    routes = [(int(row[6]), row[0]) for row in four if len(row) > 7 and row[1] == row[7] == "00000000"]
    routes = routes or [
        (int(row[5], 16), row[9])
        for row in six
        if len(row) > 9 and row[0] == "0" * 32 and row[1] == "00" and row[9] != "lo"
    ]
    return min(routes)[1] if routes else ""


def _free_storage(path: Path) -> int | None:
    """The free bytes for a file at `path`, which need not exist yet."""
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))
    try:
        stats = os.statvfs(existing)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize


def _free_memory(path: Path) -> int | None:
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(value.split()[0])
    return None


def _headroom(folder: Path) -> float | None:
    """Degrees Celsius until the first zone slows the machine down; zones without such a trip point do not count."""
    room = []
    for zone in _entries(folder):
        temperature = _number(_word(zone / "temp"))
        if temperature is not None:
            room += [(trip - temperature) / 1000 for trip in _trips(zone)]
    return min(room, default=None)


def _trips(zone: Path) -> Iterator[float]:
    for path in zone.glob("trip_point_*_type"):
        limit = _number(_word(path.with_name(path.name.replace("_type", "_temp"))))
        # A trip point that is switched off lies at or below zero.
        if _word(path) in TRIPS and limit is not None and limit > 0:
            yield limit


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _word(path: Path) -> str:
    return _text(path).strip()


def _text(path: Path) -> str:
    """A file's content; empty when it is missing or hidden from this process, or its driver cannot answer now."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


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
