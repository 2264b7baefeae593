"""synthetic(α, β): clients whose true models differ by α, and whose features differ by β.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks" (FedProx), MLSys 2020,
section 5.1 and appendix C.1. Client k draws, for 60 features and 10 classes,

    u_k ~ N(0, α)     W_k, b_k ~ N(u_k, 1)     y = argmax(W_k x + b_k)
    B_k ~ N(0, β)     v_k ~ N(B_k, 1)          x ~ N(v_k, Σ),  Σ diagonal with Σ_jj = j^−1.2

and holds 50 examples and a log-normal(4, 2) number of further ones: few clients have most examples. As in the paper's
released code, α and β are standard deviations, which matters only if they are neither 0 nor 1, and the argmax is not
sampled.
"""

from __future__ import annotations

import numpy as np

from simulator.errors import DatasetError
from simulator.population import Population

FEATURES, CLASSES = 60, 10
FEWEST, LOG_MEAN, LOG_DEVIATION = 50, 4.0, 2.0
MOST = 5_000
"""The most examples of a client: the paper's distribution is unbounded."""


def synthetic(clients: int = 30, alpha: float = 1.0, beta: float = 1.0, seed: int = 0) -> Population:
    """`x` float32 (60,), `y` int64 below 10. Raises DatasetError when a number is out of range."""
    if clients < 1 or alpha < 0 or beta < 0:
        raise DatasetError(f"synthetic has 1 client or more, and α and β from 0, not {clients}, {alpha} and {beta}")
    generator = np.random.Generator(np.random.Philox(key=[seed, clients]))
    deviation = np.arange(1, FEATURES + 1) ** -0.6
    shards = []
    for _ in range(clients):
        size = min(MOST, FEWEST + int(generator.lognormal(LOG_MEAN, LOG_DEVIATION)))
        centre = generator.normal(0, alpha)
        weights = generator.normal(centre, 1, (CLASSES, FEATURES))
        bias = generator.normal(centre, 1, CLASSES)
        means = generator.normal(generator.normal(0, beta), 1, FEATURES)
        x = generator.normal(means, deviation, (size, FEATURES))
        shards.append({"x": x.astype(np.float32), "y": (x @ weights.T + bias).argmax(1).astype(np.int64)})
    return Population.of([f"synthetic-{index:03d}" for index in range(clients)], shards)
