"""Sensitivity of a training to rounding: how far the engine's models move when numbers are rounded differently.

In a network with kinks (ReLU, pooling by maximum), rounding can decide the side on which a value falls, and the
gradient jumps (docs/decisions/0009-smooth-reference-models.md). Then fleet and engine differ by a jump, and both are
right. To measure such jumps, the engine runs the same rounds again with a rounding error in every model that devices
receive. In secure rounds every mean has an error too, from the fixed-point numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from fedcore.algorithms.algorithm import (
    Algorithm,
    Broadcast,
    Carry,
    ClientState,
    Exchange,
    Report,
    ServerStep,
    State,
    StatefulAlgorithm,
    Trip,
    Vector,
    keeps_client_state,
    trips_of,
)
from fedcore.params import Float32
from fedcore.report import Weighting
from simulator.engine import Engine
from simulator.population import Population
from simulator.proofs.fleet_against_engine import Cohort, replay, worst_distance

ROUND_OFF = 1e-7
"""The relative error of a parameter, about that of float32."""
DRAWS = 6
"""The number of runs with different errors. About half of those near a kink cross it."""


@dataclass(frozen=True, slots=True)
class _Rounded:
    """An algorithm with a rounding error in the models that devices receive, and an error in every mean.

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


class _RoundedKeeper(_Rounded):
    """The same of an algorithm whose clients keep vectors, which have no error of their own."""

    def init_client(self, params_D: Vector) -> ClientState:
        return self._keeper.init_client(params_D)

    def keep(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> ClientState:
        return self._keeper.keep(broadcast, carries)

    @property
    def _keeper(self) -> StatefulAlgorithm:
        return cast("StatefulAlgorithm", self.algorithm)


def sensitivity(
    engine: Callable[[Algorithm], Engine],
    algorithm: Algorithm,
    population: Population,
    cohorts: Sequence[Cohort],
    errors: Sequence[float],
) -> float:
    """The largest `worst_distance` between the run without errors and DRAWS runs with errors.

    engine: makes a fresh engine for an algorithm. errors: the deviation of every value of a mean, one for each trip; 0
    in plain rounds.
    """
    start = engine(algorithm).state["params"]

    def models(variant: Algorithm) -> list[Float32]:
        return [after.params for after in replay(engine(variant), population, cohorts)]

    exact = models(algorithm)
    kind = _RoundedKeeper if keeps_client_state(algorithm) else _Rounded
    rounded = (kind(algorithm, errors, np.random.default_rng(draw)) for draw in range(DRAWS))
    return max(worst_distance(start, exact, models(variant)) for variant in rounded)
