"""A rehearsal: every trip of an algorithm on tiny vectors, from which its sizes are read and its mistakes are found.

The gradient is that of a bowl, Σ½(y − 1)², on batches of two examples; every pass takes two steps. Every metric of a
forward pass is the mean loss of the bowl. One device makes the whole cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from fedcore.algorithms.algorithm import (
    Algorithm,
    Broadcast,
    Carry,
    Gradient,
    Measure,
    Report,
    ServerStep,
    State,
    Trip,
    Vector,
    trips_of,
    with_carries,
)
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.constants import constants
from fedcore.algorithms.heavy_hitters import HeavyHitters
from fedcore.algorithms.partly_local import AUTO, PartlyLocal
from fedcore.algorithms.question import Ask

Call: TypeAlias = Callable[..., dict[str, Vector]]
"""call(what, function, *arguments) gives function(*arguments); `what` names the function for a message."""

STEPS = 2


class Oracles(Protocol):
    """What passes of a rehearsal learn from examples: the gradient, by a call, and the sums of metrics."""

    def __call__(self, params: Vector) -> tuple[Vector, Vector, Vector]:
        """The gradient oracle of the contract."""

    def measure(self, metrics: int) -> Measure:
        """The oracle of a forward pass, of sums of the examples and of so many metrics."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One trip: the server state before it, what went to a device, what came back, and the server state after it."""

    before: State
    broadcast: Broadcast
    report: Report
    after: State


@dataclass(frozen=True, slots=True)
class Bowl:
    """The oracles of a bowl with its minimum at `centre`. like: a vector of the kind and type of the model's."""

    like: Vector
    centre: Any = 1.0

    def __call__(self, params: Vector) -> tuple[Vector, Vector, Vector]:
        """The gradient oracle: mean loss, gradient and number of examples."""
        one = 0.0 * params[..., :1] + 1.0
        return one, params - self.centre, 2.0 * one

    def measure(self, metrics: int) -> Measure:
        """The oracle of a forward pass over a model with so many metrics."""
        examples = constants(self.like, [2.0, *[0.0] * metrics])
        losses = constants(self.like, [0.0, *[1.0] * metrics])
        return lambda params: examples + losses * ((params - self.centre) ** 2).sum(-1)[..., None]


def plainly(what: str, function: Callable[..., dict[str, Vector]], *arguments: Any) -> dict[str, Vector]:
    """The call itself, without any look at what goes in or comes out."""
    return function(*arguments)


def rehearse(
    algorithm: Algorithm, params_D: Vector, oracles: Oracles | None = None, call: Call = plainly
) -> list[Rehearsed]:
    """Every trip, in order, from `params_D`; `oracles` are by default those of the bowl."""
    state, rehearsed, oracles = call("init", algorithm.init, params_D), [], oracles or Bowl(params_D)
    for trip in trips_of(algorithm):
        broadcast = call("broadcast", trip.broadcast, state)
        report = contribute(trip, received(algorithm, broadcast, call), oracles, call)
        after = call("update", trip.update, state, report, ServerStep())
        rehearsed.append(Rehearsed(state, broadcast, report, after))
        state = after
    return rehearsed


def moves_by_participation(algorithm: Algorithm) -> bool:
    """Whether the state moves by the share of all clients that a round counts (`ServerStep.participation`)."""
    algorithm = for_any_model(algorithm)

    def moved(share: float) -> list[State]:
        pairs = zip(trips_of(algorithm), rehearse(algorithm, np.linspace(-1.0, 1.0, 5)), strict=True)
        return [trip.update(one.before, one.report, ServerStep(participation=share)) for trip, one in pairs]

    with np.errstate(all="ignore"):
        pairs = zip(moved(1.0), moved(0.5), strict=True)
        return any(
            not np.array_equal(vector, half[name], equal_nan=True)
            for whole, half in pairs
            for name, vector in whole.items()
        )


def for_any_model(algorithm: Algorithm) -> Algorithm:
    """The algorithm with settings that suit a model of any size, such as the small ones of rehearsals."""
    if isinstance(algorithm, Clipped):
        return replace(algorithm, inner=for_any_model(algorithm.inner))
    if isinstance(algorithm, PartlyLocal):
        return replace(algorithm, local=AUTO)
    if isinstance(algorithm, HeavyHitters):
        return replace(algorithm, letters=0, bits=1, candidates=1, step_bits=1)
    return replace(algorithm, question=AUTO) if isinstance(algorithm, Ask) else algorithm


def received(algorithm: Any, broadcast: Broadcast, call: Call = plainly) -> Broadcast:
    """What a device's passes get: the broadcast, and in front of round 0 what a client keeps, where it keeps any."""
    if not hasattr(algorithm, "init_client"):
        return broadcast
    return {**broadcast, **call("init_client", algorithm.init_client, broadcast["params"])}


def contribute(
    trip: Trip,
    broadcast: Broadcast,
    oracles: Oracles,
    call: Call = plainly,
    spread: Callable[[Mapping[str, Vector]], Carry] = dict,
) -> Report:
    """The report of a device in one trip. `spread` is done to the first carry of every pass."""
    return call("report", trip.report, broadcast, carried(trip, broadcast, oracles, call, spread))


def carried(
    trip: Trip,
    broadcast: Broadcast,
    oracles: Oracles,
    call: Call = plainly,
    spread: Callable[[Mapping[str, Vector]], Carry] = dict,
) -> dict[str, Carry]:
    """The last carry of every pass of a trip, by name."""
    carries: dict[str, Carry] = {}
    for stage in trip.passes:
        known = with_carries(broadcast, carries)
        carry = spread(call(f"begin of pass {stage.name}", stage.begin, known))
        oracle: Gradient | Measure = oracles.measure(len(stage.measures)) if stage.forward else oracles
        for _ in range(STEPS):
            carry = call(f"step of pass {stage.name}", stage.step, carry, known, oracle)
        carries[stage.name] = carry
    return carries
