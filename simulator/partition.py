"""Partition of a pooled data set over clients, non-IID on purpose."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.errors import DatasetError


def dirichlet(labels: NDArray[np.int64], clients: int, alpha: float, seed: int) -> list[NDArray[np.int64]]:
    """Indices per client; each client draws its class mix from Dirichlet(alpha) (Hsu, Qi, Brown 2019).

    Clients hold equally many examples (give or take one), each example exactly once. A smaller alpha is less IID.
    """
    if not 1 <= clients <= labels.size:
        raise DatasetError(f"{labels.size} examples cannot be split over {clients} clients")
    generator = np.random.Generator(np.random.Philox(key=[seed, clients]))
    classes = int(labels.max()) + 1
    pools = [generator.permutation(np.flatnonzero(labels == label)).tolist() for label in range(classes)]
    shards = []
    for client in range(clients):
        wanted = generator.dirichlet(np.full(classes, alpha))
        size = labels.size // clients + (client < labels.size % clients)
        shard = []
        for _ in range(size):
            # A class that has run out is drawn no more; the rest keep their proportions.
            left = np.array([len(pool) > 0 for pool in pools])
            weights = np.where(left, wanted + 1e-12, 0)
            shard.append(pools[generator.choice(classes, p=weights / weights.sum())].pop())
        shards.append(np.array(sorted(shard), np.int64))
    return shards
