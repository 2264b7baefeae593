"""The trial of a model before its first round: the engine must train it as plain torch does (export/purity.py)."""

from __future__ import annotations

import functools
import importlib
import types
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from export.errors import ExportError, InvalidModel, reason
from export.model import Model
from export.purity import EXAMPLES, Found, Sample, check_pure
from export.trial_examples import check_ranges
from fedcore.decoding import decoder
from simulator.engines.computing import Computing
from simulator.engines.oracle import CohortOracle
from simulator.engines.workers.forked import compute_apart
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
