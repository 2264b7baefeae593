"""The simulator: a vectorised engine, and a fleet of emulated devices on the real protocol that agrees with it.

The names below are for programs and notebooks (docs/simulation.md). Each is imported on first use, because the engine
by itself needs fewer packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcore.schedule import ServerSchedule
    from simulator.configuration import SimulationConfig
    from simulator.datasets import load
    from simulator.population import Population
    from simulator.runs.reading import Run, read_run
    from simulator.runs.running import resume_run, start_run
    from simulator.simulation import SimulationResult, simulate

__all__ = [
    "Population",
    "Run",
    "ServerSchedule",
    "SimulationConfig",
    "SimulationResult",
    "load",
    "read_run",
    "resume_run",
    "simulate",
    "start_run",
]

_HOMES = {
    "Population": "simulator.population",
    "Run": "simulator.runs.reading",
    "ServerSchedule": "fedcore.schedule",
    "SimulationConfig": "simulator.configuration",
    "SimulationResult": "simulator.simulation",
    "load": "simulator.datasets",
    "read_run": "simulator.runs.reading",
    "resume_run": "simulator.runs.running",
    "simulate": "simulator.simulation",
    "start_run": "simulator.runs.running",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'simulator' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
