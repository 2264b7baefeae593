"""The examples of a population on one compute device, and what in them makes a loss that is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from export.model import GradientOracle, Model
from fedcore.params import Float32
from simulator.engines.memory import may_stay
from simulator.population import Population


class Examples:
    """The examples of a population. whole: whether all lie on the compute device; by default, if they fit."""

    def __init__(self, device: torch.device, population: Population, *, whole: bool | None = None) -> None:
        self._device, self._population = device, population
        nbytes = sum(array.nbytes for array in population.fields.values())
        self._whole = may_stay(nbytes, device) if whole is None else whole
        self._fields = on_device(device if self._whole else torch.device("cpu"), population.fields)

    def of(self, clients: Sequence[int]) -> tuple[dict[str, Tensor], list[int]]:
        """Fields (n, …) on the compute device, with the examples of these clients, and where those of each begin."""
        starts = self._population.starts
        if self._whole:
            return self._fields, starts[list(clients)].tolist()
        ranges = [slice(int(starts[client]), int(starts[client + 1])) for client in clients]
        begin = np.cumsum([0, *(rows.stop - rows.start for rows in ranges)]).tolist()
        fields = {name: self._copied(array, ranges, begin[-1]) for name, array in self._fields.items()}
        return fields, begin[:-1]

    def _copied(self, array: Tensor, ranges: Sequence[slice], total: int) -> Tensor:
        """Some ranges of an array on the host, one after the other, on the compute device."""
        # From pinned memory a GPU copies asynchronously, while the CPU continues.
        pinned = self._device.type == "cuda"
        staged = torch.empty((total, *array.shape[1:]), dtype=array.dtype, pin_memory=pinned)
        torch.cat([array[rows] for rows in ranges], out=staged)
        return staged.to(self._device, non_blocking=True)


def on_device(device: torch.device, arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
    """Arrays by name as tensors on a compute device, without texts, which no model reads as they are."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for name, array in arrays.items()
        if array.dtype != object
    }


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
