"""The header of every result: benchmark, date, machine and versions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("muster-fl", "numpy", "cryptography", "onnxruntime", "torch", "executorch")
"""Packages whose versions decide figures."""


def header(benchmark: str) -> dict[str, object]:
    """The first keys of a result: `benchmark`, `date` in UTC, `machine`, `cores` and `versions`.

    cores: those that this process may use. versions: of Python and of PACKAGES, as far as they are installed.
    """
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {_processor()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {"python": sys.version.split()[0], **dict(_versions())},
    }


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
