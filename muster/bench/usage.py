"""What another process of this machine has used so far, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


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
        # Behind the command's name, which may hold anything, the fields of proc(5) from the third on.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
        status = {name: value.split()[0] for name, _, value in lines if value.endswith(" kB")}
        return cls(
            cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
            rss_mb=int(status["VmRSS"]) / 1024,
            peak_rss_mb=int(status["VmHWM"]) / 1024,
            descriptors=len(list((folder / "fd").iterdir())),
        )
