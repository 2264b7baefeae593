"""`muster demo` as a command of its own: its wall and CPU time, and the phases that take it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import DemoOptions
from muster.output import Say


class DemoBroke(Exception):
    """The demo failed; the message ends with the last line of its standard error."""


def run(options: DemoOptions, say: Say) -> dict[str, Any]:
    """One run of `muster demo`, start of the interpreter and all. Raises DemoBroke.

    wall_s, cpu_s: of the command and of all processes that it started. accuracy: of each algorithm, on held-out users.
    phases: mean seconds, of a session on the device and of a round in the coordinator, and of each algorithm's export
    and replay; and those from the best model to an app. demo: what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        command = [sys.executable, "-m", "muster", "demo", "--json", "--rounds", str(options.rounds)]
        before, started = _cpu_s(), time.monotonic()
        demo = json.loads(_printed([*command, "--out", str(Path(folder) / "kept")], say))
        wall_s, cpu_s = time.monotonic() - started, _cpu_s() - before
    accuracy = {name: result["test_accuracy"] for name, result in demo["algorithms"].items()}
    return {"wall_s": wall_s, "cpu_s": cpu_s, "accuracy": accuracy, "phases": _phases(demo), "demo": demo}


def _printed(command: Sequence[str], say: Say) -> str:
    """The standard output of the command, once it has ended; its standard error is shown as progress."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None  # noqa: S101, PT018 - for the type checker
        for line in process.stderr:
            say(last := line.strip())
        printed = process.stdout.read()
    if process.returncode:
        raise DemoBroke(f"muster demo ended with {process.returncode}: {last}")
    return printed


def _phases(demo: dict[str, Any]) -> dict[str, dict[str, float]]:
    runs = demo["algorithms"]
    sessions = sum(result["sessions"] for result in runs.values())
    return {
        "session": {
            phase: sum(result["phases"][phase] * result["sessions"] for result in runs.values()) / sessions
            for phase in next(iter(runs.values()))["phases"]
        },
        "round": demo["round_steps"],
        "export": {name: result["export_seconds"] for name, result in runs.items()},
        "replay": {name: result["replay_seconds"] for name, result in runs.items()},
        "app": {demo["app"]["algorithm"]: demo["app"]["seconds"]},
    }


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
