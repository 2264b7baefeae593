"""Causes of a loss that is not a finite number: the data, the model, or training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from export.model import GradientOracle, Model
from fedcore.params import Float32
from simulator.engines.examples import on_device
from simulator.population import Population

DIVERGED = "training diverged; a lower client_lr is the likely remedy"
_ZERO = "look for a logarithm, a quotient, a root or a norm of 0 in the model and its loss"


def cause(model: Model, params: Float32, population: Population, clients: Sequence[int], rounds: int) -> str:
    """The reason that training `clients` from `params`, the model after `rounds` rounds, gives no finite numbers."""
    if not np.isfinite(params).all():
        return f"the update of round {rounds} left the finite numbers: {DIVERGED}"
    for client in clients:
        for name, array in population.shard(client).items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                whose = f"field {name!r} of client {population.clients[client]!r}"
                return f"{whose} holds NaN or an infinity; mend the data set"
    batch = on_device(torch.device("cpu"), population.shard(clients[0]))
    mask = torch.ones(int(population.sizes[clients[0]]))
    loss, gradient, _ = GradientOracle(model, batch, mask)(torch.from_numpy(params))
    if rounds == 0 and not torch.isfinite(loss):
        return f"{model.spec.name} has a loss of {loss.item()} before any training, on finite examples; {_ZERO}"
    if torch.isfinite(loss) and not torch.isfinite(gradient).all():
        return f"{model.spec.name} has a finite loss, and a gradient that is not; {_ZERO}"
    return DIVERGED
