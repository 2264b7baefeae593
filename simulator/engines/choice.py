"""The choice of an engine for a training, with a trial that its model trains there as in plain torch."""

from __future__ import annotations

import functools
import importlib
import logging
import types
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from export.errors import ExportError, InvalidModel, reason
from export.model import Model
from export.purity import EXAMPLES, Found, Sample, check_pure
from export.trial_examples import check_ranges
from fedcore.algorithms.algorithm import Algorithm, keeps_client_state
from fedcore.validation import decoder
from simulator.engines import Wanted
from simulator.engines.computing import Computing
from simulator.engines.oracle import CohortOracle
from simulator.engines.processes import compute_apart
from simulator.errors import EngineError
from simulator.population import Population

_NOTHING = decoder(types.NoneType)


def check_model(model: Model, users: Population, computing: Computing) -> None:
    """Try a model on a few examples of the users, on the CPU; not in this process where it is to fork others.

    Raises ExportError, naming what makes the engine train something else, or when the model does not run.
    """
    rows = np.linspace(0, users.starts[-1] - 1, EXAMPLES).astype(np.int64)
    examples = {field.name: users.fields[field.name][rows] for field in model.spec.fields}
    together = min(2, replace(computing, device="cpu").together(model))
    check = functools.partial(_check, model, examples, together)
    if computing.forks:
        importlib.import_module("torch._dynamo")  # which takes a second, and every process needs it for its gradients
        compute_apart(check, _NOTHING)
    else:
        check()


def _check(model: Model, examples: dict[str, np.ndarray], together: int) -> None:
    gradient = functools.partial(_of_cohort, together, model.noisy)
    try:
        check_pure(model, examples, gradient)
        check_ranges(model)
    except (ExportError, EngineError):
        raise
    except Exception as error:  # whatever the user's own code raises
        raise InvalidModel(f"{model.spec.name} does not run on {EXAMPLES} examples: {reason(error)}") from error


def _of_cohort(clients: int, noisy: bool, model: Model, params_D: Tensor, sample: Sample) -> Found:
    """The result for the first of several clients, all with one batch, from the oracle of a cohort."""
    fields = {name: torch.stack([values] * clients) for name, values in sample.fields.items()}
    noise_KB = torch.stack([sample.noise] * clients) if noisy else None
    oracle = CohortOracle(model, fields, torch.stack([sample.mask] * clients), noise_KB)
    gradient_KD = oracle(params_D)[1]
    return Found(oracle.sums_KM[0], gradient_KD[0])


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
    (simulator/engines/choice.py) or has no graphs.
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
    # Computed apart where processes will be forked (engines/processes.py says why).
    return replace(torch_alone, graphs=compute_apart(export, EXPORTED) if torch_alone.forks else export())
