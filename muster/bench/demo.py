"""`muster demo` as a command of its own: its wall and CPU time, and the phases that take it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from fedcore.decoding import decoder
from muster.bench.machine import describe_machine

_DEMO = decoder(dict[str, Any])


class DemoBroke(Exception):
    """The demo did not come to its end; its own words say why."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `muster demo`, start of the interpreter and all.

    wall_s, cpu_s: of the command and of all processes that it started. phases: mean seconds, of a session on the device
    and of a round in the coordinator, and of each algorithm's export and replay.
    """

    benchmark: str = "demo"
    date: str
    machine: str
    cores: int
    python: str
    wall_s: float
    cpu_s: float
    phases: dict[str, dict[str, float]]
    demo: dict[str, Any]


def run(rounds: int) -> Result:
    """Run it with so many rounds for each algorithm. Raises DemoBroke."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        command = [sys.executable, "-m", "muster", "demo", "--json", "--rounds", str(rounds)]
        before, started = _cpu_s(), time.monotonic()
        ended = subprocess.run([*command, "--out", str(Path(folder) / "c.svg")], stdout=subprocess.PIPE, check=False)
        wall_s, cpu_s = time.monotonic() - started, _cpu_s() - before
    if ended.returncode:
        raise DemoBroke(f"muster demo ended with {ended.returncode}")
    demo = _DEMO.decode(ended.stdout)
    return Result(
        date=datetime.now(UTC).date().isoformat(),
        machine=describe_machine(),
        cores=len(os.sched_getaffinity(0)),
        python=sys.version.split()[0],
        wall_s=wall_s,
        cpu_s=cpu_s,
        phases=_phases(demo),
        demo=demo,
    )


def _phases(demo: dict[str, Any]) -> dict[str, dict[str, float]]:
    runs = demo["algorithms"]
    sessions = sum(one["sessions"] for one in runs.values())
    device = {
        phase: sum(one["phases"][phase] * one["sessions"] for one in runs.values()) / sessions
        for phase in next(iter(runs.values()))["phases"]
    }
    return {
        "session": device,
        "round": demo["round_steps"],
        "export": {name: one["export_seconds"] for name, one in runs.items()},
        "replay": {name: one["replay_seconds"] for name, one in runs.items()},
    }


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
