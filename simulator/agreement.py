"""The keystone: the engine, replaying a fleet's cohorts, must reach the fleet's model within float32 round-off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from coordinator.rounds import AssignmentState
from coordinator.tasks import CoordinatorStore
from fedcore.params import Float32
from simulator.engine import Engine
from simulator.population import Population

Cohort = Mapping[int, str]
"""Client by slot: whose reports a round counted."""


def counted_cohort(store: CoordinatorStore, task: str, number: int, clients: Mapping[str, str]) -> Cohort:
    """Whose reports round `number` counted; `clients` names the client behind each device id."""
    seats = store.cohort(task, number)
    return {seat.slot: clients[seat.device] for seat in seats if seat.state is AssignmentState.REPORTED}


def worst_difference(
    engine: Engine, population: Population, cohorts: Sequence[Cohort], fleet_params: Sequence[Float32]
) -> float:
    """Run rounds 1, 2, … of `cohorts` on a fresh `engine`; the largest relative difference from the fleet's models.

    fleet_params: the fleet's parameters (D,) after each of those rounds. The difference after a round is the l2 norm of
    the two models' difference over that of the fleet's whole way from the start, which is stricter than over the model.
    """
    start = engine.state["params"]
    worst = 0.0
    for number, (cohort, params) in enumerate(zip(cohorts, fleet_params, strict=True), start=1):
        slots = sorted(cohort)
        engine.run_round(number, [population.clients.index(cohort[slot]) for slot in slots], slots)
        gap = np.linalg.norm(engine.state["params"].astype(np.float64) - params)
        worst = max(worst, float(gap / np.linalg.norm(params.astype(np.float64) - start)))
    return worst
