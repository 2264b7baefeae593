"""Muster trains a model across devices: for programs and notebooks, and as the command line::

    import muster

    run = muster.simulate("mlp", algorithm="fedadam", rounds=20)
    bundle = muster.export("mlp", algorithm="fedadam", out="plan")
    with muster.Coordinator("http://127.0.0.1:8081", token) as coordinator:
        task = coordinator.create(bundle, population="phones", goal=20, rounds=10)

docs/python.md has them all. They are imported when they are first used: `import muster` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.python.exporting import export, export_model, forecast
    from muster.python.operating import Coordinator, Task, ask, demo
    from muster.python.simulating import Run, Sweep, load, plot, simulate, sweep
    from simulator.population import Population

__all__ = [
    "Coordinator",
    "Population",
    "Run",
    "Sweep",
    "Task",
    "ask",
    "demo",
    "export",
    "export_model",
    "forecast",
    "load",
    "plot",
    "simulate",
    "sweep",
]

_HOMES = {
    "Coordinator": "muster.python.operating",
    "Population": "simulator.population",
    "Run": "muster.python.simulating",
    "Sweep": "muster.python.simulating",
    "Task": "muster.python.operating",
    "ask": "muster.python.operating",
    "demo": "muster.python.operating",
    "export": "muster.python.exporting",
    "export_model": "muster.python.exporting",
    "forecast": "muster.python.exporting",
    "load": "muster.python.simulating",
    "plot": "muster.python.simulating",
    "simulate": "muster.python.simulating",
    "sweep": "muster.python.simulating",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
