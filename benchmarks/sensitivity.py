"""Sensitivity of a training to rounding: how far the engine's own models move when numbers are rounded otherwise.

Where a network has kinks (ReLU, pooling by maximum), round-off can decide the side on which a value falls, and the
gradient jumps (docs/decisions/0009-smooth-reference-models.md). Then fleet and engine are apart by a jump, and both are
right. The same rounds, run again in the engine with every model that devices receive off by round-off, show how far
that goes. In secure rounds every mean is off too, by the fixed-point numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcore.algorithms.algorithm import (
    Algorithm,
    Broadcast,
    Exchange,
    Report,
    ServerStep,
    State,
    Trip,
    Vector,
    trips_of,
)
from fedcore.report import Weighting
from simulator.engine import Engine
from simulator.population import Population
from simulator.proofs.fleet_against_engine import Cohort, replay, worst_distance

ROUND_OFF = 1e-7
"""The relative error of a parameter, about that of float32."""
DRAWS = 6
"""Runs with other errors. Of those near a kink about half meet it."""


@dataclass(frozen=True, slots=True)
class _Rounded:
    """An algorithm whose devices receive a model that is off by round-off, and whose means are off by an error.

    errors: the deviation of every value of a mean, one for each trip.
    """

    name: ClassVar[str] = "rounded"
    family: ClassVar[str] = "rounded"

    algorithm: Algorithm
    errors: Sequence[float]
    source: np.random.Generator

    @property
    def weighting(self) -> Weighting:
        return self.algorithm.weighting

    @property
    def trips(self) -> tuple[Trip, ...]:
        return tuple(map(self._rounded, trips_of(self.algorithm), self.errors))

    def init(self, params_D: Vector) -> State:
        return self.algorithm.init(params_D)

    def _rounded(self, trip: Trip, error: float) -> Exchange:
        def broadcast(state: State) -> Broadcast:
            sent = trip.broadcast(state)
            return sent | {"params": sent["params"] * (1 + self._noise(sent["params"], ROUND_OFF))}

        def update(state: State, mean: Report, step: ServerStep) -> State:
            return trip.update(state, {name: value + self._noise(value, error) for name, value in mean.items()}, step)

        return Exchange(tuple(trip.passes), broadcast, trip.report, update)

    def _noise(self, like: Vector, deviation: float) -> Vector:
        return like.new_tensor(deviation * self.source.standard_normal(tuple(like.shape)))


def sensitivity(
    engine: Callable[[Algorithm], Engine],
    algorithm: Algorithm,
    population: Population,
    cohorts: Sequence[Cohort],
    errors: Sequence[float],
) -> float:
    """The largest distance, as of `worst_distance`, of DRAWS runs with rounding from the run without.

    engine: makes a fresh engine for an algorithm. errors: the deviation of every value of a mean, one for each trip; 0
    in plain rounds.
    """
    start = engine(algorithm).state["params"]
    exact = list(replay(engine(algorithm), population, cohorts))
    rounded = (_Rounded(algorithm, errors, np.random.default_rng(draw)) for draw in range(DRAWS))
    return max(worst_distance(start, exact, replay(engine(one), population, cohorts)) for one in rounded)
