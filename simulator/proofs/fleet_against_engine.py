"""Replay of a fleet's cohorts in the engine, which must reach the fleet's model within round-off: the keystone.

In plain rounds this is the rounding of float32, in secure rounds that of fixed-point numbers (`rounding_error`). A
model with dropout cannot be replayed from secure rounds, where only the device knows its noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from coordinator.rules.states import AssignmentState
from coordinator.store.tasks import CoordinatorStore, Secagg
from fedcore.masking import fixed_point
from fedcore.params import Float32
from fedcore.release import SumBounds
from fedcore.report import ReportLayout
from simulator.engine import Engine
from simulator.errors import EngineError
from simulator.population import Population

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


def rounding_error(secagg: Secagg, layout: ReportLayout, examples: Sequence[int]) -> float:
    """A bound on the l2 distance between the mean of reports under secure aggregation and the exact one, by rounding.

    It is the root of the worst expected square, for devices with these numbers of examples; over thousands of values it
    hardly varies. Clipping is not included. Codecs that shorten a segment increase the error of coded values in the
    same proportion. Source: docs/spec/wire.md §8.
    """
    w_max = secagg.max_examples if layout.weighting == "examples" else 1
    weights = [min(int(layout.weight(count)), w_max) for count in examples]
    bounds = SumBounds(clip_norm=secagg.clip_norm, bits=secagg.bits, max_examples=w_max, min_sum=1)
    points = [(segment, fixed_point(segment, bounds)) for segment in layout.unweighted if segment.normed]
    square = sum((segment.size * point.step) ** 2 / point.size for segment, point in points)
    return float(w_max * math.sqrt(len(weights) * square) / (2 * sum(weights)))


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
    """Replay `cohorts` on a fresh `engine`: `worst_distance` of its models from the fleet's.

    fleet_params: the fleet's parameters (D,) after each of those rounds.
    """
    start = engine.state["params"]
    return worst_distance(start, fleet_params, (after.params for after in replay(engine, population, cohorts)))


def worst_figure(
    engine: Engine, population: Population, cohorts: Sequence[Cohort], fleet_metrics: Sequence[Mapping[str, float]]
) -> float:
    """Replay `cohorts` on a fresh `engine`: the largest distance of a metric of a round from the fleet's.

    It is relative for values above 1, such as numbers of examples, and infinite where the engine lacks one.
    """
    worst = 0.0
    for ours, after in zip(fleet_metrics, replay(engine, population, cohorts), strict=True):
        if not set(ours) <= set(after.metrics):
            return math.inf
        worst = max([worst, *(_apart(value, after.metrics[name]) for name, value in ours.items())])
    return worst


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(1.0, abs(one))


def worst_distance(start: Float32, these: Iterable[Float32], those: Iterable[Float32]) -> float:
    """The largest relative distance of two trainings' models, round by round, from the same `start`.

    The distance after a round is the l2 norm of the two models' difference, relative to the movement of `these` since
    the start, which is stricter than relative to the model.
    """
    worst = 0.0
    for this, that in zip(these, those, strict=True):
        gap = float(np.linalg.norm(that.astype(np.float64) - this))
        way = float(np.linalg.norm(this.astype(np.float64) - start))
        # The first of two trips does not move the model, so the models must be equal.
        worst = max(worst, 0.0 if gap == 0 else gap / way if way else math.inf)
    return worst
