"""Constants of an algorithm as a vector of its state: edges of bins, or ranges of metrics."""

from __future__ import annotations

from collections.abc import Sequence

from fedcore.algorithms.algorithm import Vector


def constants(params_D: Vector, values: Sequence[float]) -> Vector:
    """A vector (n,) with the values, of the kind and type of `params_D`. For `init` alone: graphs never make one."""
    made = (0.0 * params_D[:1]).repeat(len(values))
    for index, value in enumerate(values):
        made[index : index + 1] = 0.0 * params_D[:1] + value
    return made
