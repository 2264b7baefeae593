"""The choice of an engine for a training, with a trial of its model: as requested, or torch, else graphs."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec

from export.errors import ExportError
from export.model import Model
from fedcore.algorithms.algorithm import Algorithm, keeps_client_state
from simulator.engines import Wanted
from simulator.engines.computing import Computing
from simulator.engines.workers.forked import compute_apart
from simulator.errors import EngineError
from simulator.population import Population
from simulator.purity import check_model

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine for a training. reason: for the choice, as a clause."""

    computing: Computing
    reason: str


def choose(wanted: Wanted, model: Model, algorithm: Algorithm, users: Population, torch_alone: Computing) -> Choice:
    """The requested engine. "auto" means torch, or graphs for a model that torch cannot run, with a log message.

    torch_alone: device and processes, without graphs. If processes will be forked, no gradient is computed in this one.
    Raises EngineError when the engine cannot run the model, and ExportError when the model is not pure
    (simulator/purity.py) or has no graphs.
    """
    obstacle = _obstacle(algorithm, torch_alone.device)
    if wanted == "graphs":
        if obstacle:
            raise EngineError(f"the engine graphs cannot run this: {obstacle}; take the engine torch")
        return Choice(_on_graphs(model, algorithm, users, torch_alone), "as asked")
    try:
        check_model(model, users, torch_alone)
    except EngineError as error:
        if wanted == "torch" or obstacle:
            raise
        try:
            on_graphs = _on_graphs(model, algorithm, users, torch_alone)
        except ExportError as none:
            raise EngineError(f"{error}; nor are there graphs of it: {none}; try --at-once=1") from error
        reason = f"torch cannot train several clients together: {error}"
        log.warning("the engine graphs trains, because %s", reason)
        return Choice(on_graphs, reason)
    return Choice(torch_alone, "as asked" if wanted == "torch" else "torch runs the model")


def _obstacle(algorithm: Algorithm, device: str) -> str:
    """The reason that graphs cannot run; empty if they can."""
    if keeps_client_state(algorithm):
        return f"{algorithm.name} keeps vectors on clients, and only torch moves those of a whole population"
    if device != "cpu":
        return f"graphs run on the CPU, not on {device}"
    missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    return f"{' and '.join(missing)} is not installed: pip install 'muster-fl[export]'" if missing else ""


def _on_graphs(model: Model, algorithm: Algorithm, users: Population, torch_alone: Computing) -> Computing:
    """The same computing on graphs, after a trial of the model as they train: one client at a time."""
    from simulator.engines.graphs import EXPORTED, export_graphs  # needs ONNX Runtime

    check_model(model, users, replace(torch_alone, at_once=1))
    export = functools.partial(export_graphs, model, algorithm)
    # Computed apart where processes will be forked (engines/forked.py says why).
    return replace(torch_alone, graphs=compute_apart(export, EXPORTED) if torch_alone.forks else export())
