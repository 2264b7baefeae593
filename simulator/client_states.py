"""Client states: the vectors that all clients of a population keep, in memory that processes share."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcore.algorithms.algorithm import Algorithm, ClientState, keeps_client_state
from simulator.engines.memory import free_bytes, may_stay
from simulator.errors import EngineError


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros on the CPU. Memory is only used once written to, and begins at a page, as that of large tensors does."""
    size = math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, max(1, size) * dtype.itemsize), dtype=dtype, count=size).reshape(shape)


@dataclass(slots=True)
class ClientStates:
    """The vectors of every client, float32 (N, …) by name. They are changed in place.

    They are where the engine computes, or on the host if a GPU has no room for them. On the host, forked processes
    share their memory. rows: the row of each client; a worker on another machine holds only the clients that it trains.
    """

    vectors: dict[str, Tensor]
    rows: range | dict[int, int]

    @classmethod
    def of(cls, algorithm: Algorithm, params_D: Tensor, clients: int) -> ClientStates:
        """The states of `clients` clients before the first round; empty for an algorithm without client state.

        Raises EngineError when they do not fit in the free memory.
        """
        if not keeps_client_state(algorithm):
            return cls({}, range(clients))
        initial = algorithm.init_client(params_D)
        size = sum(vector.numel() for vector in initial.values())
        needed, device = clients * size * params_D.element_size(), params_D.device
        if not may_stay(needed, device):
            device = torch.device("cpu")
        free = free_bytes(device)
        if free is not None and needed > free:
            raise EngineError(
                f"{algorithm.name} keeps {size:,} numbers for each of {clients:,} clients, {needed / 1e9:,.1f} GB in "
                f"all, and {free / 1e9:,.1f} GB are free on {device}; take a smaller model, fewer users, or "
                "an algorithm without client state"
            )
        vectors = {name: vector.to(device) for name, vector in initial.items()}
        if device.type == "cpu":
            rows = {name: shared_zeros((clients, len(vector))).copy_(vector) for name, vector in vectors.items()}
            return cls(rows, range(clients))
        return cls({name: vector.repeat(clients, 1) for name, vector in vectors.items()}, range(clients))

    def gather(self, clients: Sequence[int]) -> ClientState:
        """Copies (K, …) of some clients' vectors."""
        return {name: vectors[self._rows(clients)] for name, vectors in self.vectors.items()}

    def scatter(self, clients: Sequence[int], kept: ClientState, finite_K: Tensor) -> None:
        """Put the vectors (K, …) of some clients in place; a client that is not `finite_K` keeps what it had."""
        if not kept:
            return
        rows = torch.tensor(self._rows(clients), device=finite_K.device)[finite_K]
        for name, vectors in kept.items():
            home = self.vectors[name]
            home[rows.to(home.device)] = vectors[finite_K].to(home.device)

    def hold(self, clients: Sequence[int], kept: ClientState) -> None:
        """Hold the vectors (K, …) of only these clients from now on."""
        self.rows = {client: row for row, client in enumerate(clients)}
        self.vectors.update(kept)

    def _rows(self, clients: Sequence[int]) -> list[int]:
        return [self.rows[client] for client in clients]
