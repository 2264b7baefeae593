"""Starts and resumes simulations in folders, each with a picture of its learning curve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from muster.pictures.curves import draw_measured
from simulator.configuration import SimulationConfig
from simulator.runs.reading import read_run
from simulator.runs.running import resume_run, start_run, writing
from simulator.simulation import OnRound, SimulationResult

PICTURE = "learning-curve.svg"


def start(path: Path, config: SimulationConfig, on_round: OnRound) -> SimulationResult:
    """Run a simulation in a new folder. Raises as `start_run`."""
    return _drawn(path, start_run(path, config, on_round))


def resume(
    path: Path, config: SimulationConfig, on_round: OnRound, on_start: Callable[[int], None]
) -> SimulationResult:
    """Resume the run in a folder. on_start: is told how many rounds are done. Raises as `resume_run`."""
    return _drawn(path, resume_run(path, config, on_round, on_start=on_start))


def _drawn(path: Path, result: SimulationResult) -> SimulationResult:
    name = f"{result.model}, {result.baseline or result.algorithm}"
    title = f"{result.model} on {Path(result.dataset).name}"
    with writing(path):
        draw_measured({name: read_run(path).points}, title).save(path / PICTURE)
    return result
