"""Quadratics: clients whose losses are quadratic functions, for the model `least_squares`.

    F_i(x) = ½ (x − o_i)ᵀ H_i (x − o_i)      H_i = diag(h_i1, …, h_iD)      F = mean over clients of F_i

The minimum of F is x* = (1, …, 1) / √D. There the gradients of the clients differ by G, the dissimilarity of
Karimireddy et al., "SCAFFOLD", ICML 2020, assumption A1: G² = 1/N Σ_i ‖∇F_i(x*)‖². The Hessian of F has eigenvalues
from 1 down to 1 / condition, and the clients' own differ from it, coordinate by coordinate.

A client has D examples: example j is √(D h_ij) e_j, with the label that makes o_i the client's own minimum. So a
gradient on all of them is ∇F_i, without noise; smaller batches are noisy. Every F_i(o_i) is 0, so F(x*) is not.
Trap: with equal Hessians FedAvg has no drift, even if G is large.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.errors import DatasetError
from simulator.population import Population

CURVATURE_SPREAD = 0.5
"""The most by which a client's curvature differs from the mean of all clients, relatively."""


def quadratics(
    clients: int = 20, dissimilarity: float = 1.0, condition: float = 10.0, dimensions: int = 16, seed: int = 0
) -> Population:
    """Clients of equal size. `x` float32 (dimensions,), `y` float32.

    Raises DatasetError when there are fewer than two clients, or a number is out of range.
    """
    if clients < 2 or dimensions < 1:
        raise DatasetError(f"quadratics need two clients and a dimension, not {clients} and {dimensions}")
    if dissimilarity < 0 or condition < 1:
        raise DatasetError(
            f"the dissimilarity of quadratics is 0 or more and their condition 1 or more, not {dissimilarity} and "
            f"{condition}"
        )
    generator = np.random.Generator(np.random.Philox(key=[seed, clients]))
    slopes_ND = _centred(generator.standard_normal((clients, dimensions)))
    slopes_ND *= dissimilarity / np.sqrt((slopes_ND**2).sum(1).mean())
    spread_ND = _centred(generator.uniform(-1, 1, (clients, dimensions)))
    spread_ND *= CURVATURE_SPREAD / np.abs(spread_ND).max()
    curvatures_ND = np.geomspace(1, 1 / condition, dimensions) * (1 + spread_ND)
    minima_ND = minimum(dimensions) - slopes_ND / curvatures_ND
    shards = [
        {"x": np.diag(scales_D).astype(np.float32), "y": (scales_D * minimum_D).astype(np.float32)}
        for scales_D, minimum_D in zip(np.sqrt(dimensions * curvatures_ND), minima_ND, strict=True)
    ]
    return Population.of([f"quadratic-{index:03d}" for index in range(clients)], shards)


def minimum(dimensions: int) -> NDArray[np.float64]:
    """x*, the minimum of the mean loss over clients: (dimensions,), of length 1."""
    return np.full(dimensions, dimensions**-0.5)


def _centred(values_ND: NDArray[np.float64]) -> NDArray[np.float64]:
    centred: NDArray[np.float64] = values_ND - values_ND.mean(0)
    return centred
