"""CPU time, memory and open files of another process of this machine, from its CPU clock and /proc."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_CPUCLOCK_SCHED = 2
"""Of Linux: ~pid << 3 | 2 is the clock that clock_getcpuclockid(3) finds, in nanoseconds where /proc counts ticks."""


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
            cpu_s=time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED),
            rss_mb=int(status["VmRSS"]) / 1024,
            peak_rss_mb=int(status["VmHWM"]) / 1024,
            descriptors=len(list((folder / "fd").iterdir())),
        )
