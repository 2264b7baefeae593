"""CPU time of work in this process; CPU time, memory and open files of others, from their CPU clocks and /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_CPUCLOCK_SCHED = 2
"""Linux: ~pid << 3 | 2 is the clock of clock_getcpuclockid(3), which counts nanoseconds; /proc counts ticks."""


def cpu_s_of(work: Callable[[], object]) -> float:
    """CPU seconds of this process for some work."""
    started = time.process_time()
    work()
    return time.process_time() - started


def least_cpu_s(work: Callable[[], object], repeats: int) -> float:
    """The least CPU seconds of this process for some work, of several runs."""
    return min(cpu_s_of(work) for _ in range(repeats))


def in_turns(
    works: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of each work in each round, where all take turns: so ratios hold though the machine's speed changes."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            started = clock()
            work()
            spent[name].append(clock() - started)
    return spent


def times(count: int, work: Callable[[], object]) -> Callable[[], object]:
    """Work that is some other work, so many times."""
    return lambda: [work() for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Usage:
    """cpu_s: of user and system together. rss_mb, peak_rss_mb: memory now and at most, in 2²⁰ bytes."""

    cpu_s: float
    rss_mb: float
    peak_rss_mb: float
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Of a running process. Raises OSError."""
        folder = Path("/proc") / str(pid)
        lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
        status = {name: value.split()[0] for name, _, value in lines if value.endswith(" kB")}
        return cls(
            cpu_s=cpu_s(pid),
            rss_mb=int(status["VmRSS"]) / 1024,
            peak_rss_mb=int(status["VmHWM"]) / 1024,
            descriptors=len(list((folder / "fd").iterdir())),
        )


def cpu_s(pid: int) -> float:
    """CPU seconds of a running process. Raises OSError."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def main_thread_s(pid: int) -> float:
    """CPU seconds of the main thread of a running process. Raises OSError."""
    return int((Path("/proc") / f"{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def cpu_s_of_all(pid: int) -> float:
    """CPU seconds of a process and of all its descendants, with those that ended and were waited for.

    A descendant whose parent has ended is found if the process is the subreaper of its descendants (prctl(2)).
    """
    total = 0.0
    for member, stat in _family(pid):
        with contextlib.suppress(OSError):  # it has ended, and its parent counts it from now on
            total += cpu_s(member) + stat.children_s
    return total


def family_of(pid: int) -> list[int]:
    """A process and its descendants, each after its parent."""
    return [member for member, _ in _family(pid)]


@dataclass(frozen=True, slots=True)
class _Stat:
    """parent: a process id. children_s: CPU seconds of descendants that ended and were waited for."""

    parent: int
    children_s: float

    @classmethod
    def of(cls, pid: int) -> _Stat:
        text = (Path("/proc") / str(pid) / "stat").read_text()
        # After the name, which may hold anything.
        fields = text.rpartition(")")[2].split()
        return cls(int(fields[1]), (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK"))


def _family(pid: int) -> Iterator[tuple[int, _Stat]]:
    stats, children = {}, dict[int, list[int]]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                stats[int(entry.name)] = stat = _Stat.of(int(entry.name))
                children.setdefault(stat.parent, []).append(int(entry.name))
    family = [pid] if pid in stats else []
    for member in family:  # grows on the way
        yield member, stats[member]
        family += children.get(member, [])
