"""The machine that a benchmark ran on."""

from __future__ import annotations

import platform


def describe_machine() -> str:
    """The architecture and the processor's name."""
    return f"{platform.machine()}, {_processor()}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
