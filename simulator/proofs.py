"""Checks that fleet, coordinator and engine agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from coordinator.rules.states import AssignmentState
from coordinator.store.tasks import CoordinatorStore
from fedcore.params import Float32
from simulator.engine import Engine
from simulator.errors import EngineError
from simulator.population import Population

# Replay of a fleet's cohorts in the engine, which must reach the fleet's model within round-off: the keystone.
#
# In plain rounds this is the rounding of float32, in secure rounds that of fixed-point numbers. A model with dropout
# cannot be replayed from secure rounds, where only the device knows its noise.


Cohort = Mapping[int, str]
"""Clients by slot, of the reports that a round counted."""


class Replayed(NamedTuple):
    """After a round in the engine: the parameters (D,), and the round's metrics."""

    params: Float32
    metrics: dict[str, float]


def counted_cohort(store: CoordinatorStore, task: str, number: int, clients: Mapping[str, str]) -> Cohort:
    """The cohort whose reports round `number` counted; `clients` names the client behind each device id.

    Raises EngineError when the round cannot be replayed: it was secure, and its plan reads noise.
    """
    row = store.task(task)
    noisy = any(pass_plan.noise for trip in store.plan(row.plan_sha256).trips for pass_plan in trip.passes)
    if row.settings.secagg is not None and noisy:
        raise EngineError(
            f"task {task} has secure rounds and a plan with noise (dropout), which only devices know: it cannot be "
            "replayed; compare it in plain rounds"
        )
    seats = store.cohort(task, number)
    return {seat.slot: clients[seat.device] for seat in seats if seat.state is AssignmentState.REPORTED}


def replay(engine: Engine, population: Population, cohorts: Sequence[Cohort]) -> Iterator[Replayed]:
    """Rounds 1, 2, … of `cohorts` on a fresh `engine`.

    A cohort without devices means a second trip whose pair of rounds starts again: the engine goes back two rounds.
    """
    before, last, begun = engine.state, engine.state, set[int]()
    for number, cohort in enumerate(cohorts, start=1):
        before, last, slots = last, engine.state, sorted(cohort)
        metrics: dict[str, float] = {}
        if cohort:
            members = [population.clients.index(cohort[slot]) for slot in slots]
            engine.begin([member for member in members if member not in begun])
            begun.update(members)
            metrics = engine.run_round(number, members, slots).metrics
        else:
            engine.restore(before)
        yield Replayed(engine.state["params"], metrics)


def worst_difference(
    engine: Engine, population: Population, cohorts: Sequence[Cohort], fleet_params: Sequence[Float32]
) -> float:
    """Replay `cohorts` on a fresh `engine`: the largest relative distance of its models from the fleet's.

    fleet_params: the fleet's parameters (D,) after each of those rounds. The distance after a round is the l2 norm of
    the two models' difference, relative to the movement of the fleet's since the start, which is stricter than relative
    to the model.
    """
    start, worst = engine.state["params"], 0.0
    for ours, after in zip(fleet_params, replay(engine, population, cohorts), strict=True):
        gap = float(np.linalg.norm(after.params.astype(np.float64) - ours))
        way = float(np.linalg.norm(ours.astype(np.float64) - start))
        # The first of two trips does not move the model, so the models must be equal.
        worst = max(worst, 0.0 if gap == 0 else gap / way if way else math.inf)
    return worst
