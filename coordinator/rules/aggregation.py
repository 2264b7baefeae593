"""Aggregation: from summed reports to the next server state, in float64. No single report is kept.

Legend: D parameters, L values of a report. Spec: docs/spec/rounds.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.errors import InvalidTask, NonFiniteState
from fedcore import checkpoint
from fedcore.algorithms.algorithm import Algorithm, ServerStep, Trip, figures_of, keeps_client_state, trips_of
from fedcore.algorithms.fitting import with_local
from fedcore.errors import ReportError
from fedcore.loss_counts import LOSS_COUNTS, LOSSES
from fedcore.params import FLOAT_BYTES, Float32, VectorSpec
from fedcore.plan import Plan
from fedcore.report import ReportLayout, Weighting

Vectors = dict[str, Float32]
_BLOCK = 1 << 16
"""Values of a sum that stay in a core's second cache while reports are added to them."""
_LEAST = 1 << 20
"""The values that a vector of a plan may have whatever the size of the state."""


class ReportSum:
    """The running sum of a round's reports: float64 (L,), whatever the size of the cohort."""

    def __init__(self, size: int) -> None:
        self.total_L: NDArray[np.float64] = np.zeros(size)

    def add(self, *reports_KL: NDArray[np.floating[Any]]) -> None:
        """Fold in reports, or the sum of many; in blocks, so that the sum is fetched from memory once for all."""
        scratch = np.empty(min(_BLOCK, self.total_L.size))
        for begin in range(0, self.total_L.size, _BLOCK):
            block = self.total_L[begin : begin + _BLOCK]
            widened = scratch[: block.size]
            for report_L in reports_KL:
                np.copyto(widened, report_L[begin : begin + _BLOCK])
                block += widened

    def total(self) -> NDArray[np.float64]:
        """The sum, float64 (L,)."""
        return self.total_L


class Aggregate(NamedTuple):
    """The result of a round: the server state after it, the broadcast to devices, and mean metrics with figures.

    losses: how many devices reached each level of loss, where the plan counts them (`fedcore.loss_counts`).
    """

    state: Vectors
    broadcast: Vectors
    metrics: dict[str, float]
    losses: NDArray[np.float64] | None


def state_specs(plan: Plan, algorithm: Algorithm) -> tuple[VectorSpec, ...]:
    """The vectors of the algorithm's server state for the plan's model."""
    return checkpoint.specs_of(algorithm.init(np.zeros(plan.schema.size, np.float32)))


def aggregate(
    layout: ReportLayout,
    trip: Trip,
    state: Vectors,
    total_L: NDArray[np.float64],
    step: ServerStep = ServerStep(),
    following: Trip | None = None,
) -> Aggregate:
    """Apply the mean of the summed reports to `state`: float64 throughout, rounded to float32 at the end.

    layout, total_L: of the sum after `ReportLayout.decode`.
    trip, following: those of this round and of the next one, whose devices receive the broadcast; by default the same.
    Raises ReportError when the summed weight is not positive, NonFiniteState naming the first bad vector.
    """
    # Overflow is looked for in the result, where it can be named; a warning would only say that it happened.
    with np.errstate(all="ignore"):
        parts = layout.split(total_L)
        updated = trip.update({name: value.astype(np.float64) for name, value in state.items()}, parts, step)
        rounded = {name: value.astype(np.float32) for name, value in updated.items()}
    for name, value in rounded.items():
        if not np.isfinite(value).all():
            means = [parts[segment.name] for segment in layout.segments if segment.reduction == "mean"]
            largest = max(float(np.abs(mean).max()) for mean in means)
            raise NonFiniteState(
                f"after the update, vector {name!r} of the server state holds a non-finite number; the reports were "
                f"finite, and the largest value of their mean was {largest:.2g}: training diverged, or a report was "
                "false; roll the task back to an earlier round, lower max_norm, client_lr or server_lr in a new one"
            )
    metrics = layout.metrics(parts) | figures_of(trip, parts, step)
    losses = parts[LOSSES] if LOSS_COUNTS in layout.segments else None
    return Aggregate(rounded, (following or trip).broadcast(rounded), metrics, losses)


def check_sizes(plan: Plan, state_bytes: int) -> None:
    """Check that no vector of the plan is much longer than the initial state that is there, before one is made.

    Raises InvalidTask naming the vector.
    """
    most = max(state_bytes // FLOAT_BYTES, _LEAST)
    for trip in plan.trips:
        sizes = {"params": trip.schema.size} | {segment.name: segment.size for segment in trip.report.decoded.segments}
        for name, size in sizes.items():
            if size > most:
                raise InvalidTask(
                    f"{name!r} has {size:,} values in the plan, and the initial state has room for {most:,}: "
                    "they are not of one export; export the model again"
                )


def check_fit(plan: Plan, algorithm: Algorithm, state: Vectors) -> None:
    """Check that plan, algorithm and initial state fit, by one round of every trip without devices.

    Raises InvalidTask saying what does not fit, InvalidSetting where the model's local parameters do not.
    """
    if with_local(algorithm, plan.schema) != algorithm:
        raise InvalidTask(f"{algorithm.name} does not say which parameters are local: export the model again")
    trips = trips_of(algorithm)
    if len(plan.trips) != len(trips):
        raise InvalidTask(f"the algorithm has {len(trips)} trips, the plan {len(plan.trips)}")
    for planned, trip in zip(plan.trips, trips, strict=True):
        _check_trip(planned, algorithm.weighting, trip, state)


def _check_trip(plan: Plan, weighting: Weighting, trip: Trip, state: Vectors) -> None:
    if plan.report.weighting != weighting:
        raise InvalidTask(f"the plan weighs by {plan.report.weighting}, the algorithm by {weighting}")
    broadcast = checkpoint.specs_of(trip.broadcast(state))
    if set(broadcast) != set(plan.broadcast):
        raise InvalidTask(f"the algorithm broadcasts {broadcast}, the plan expects {plan.broadcast}")
    if VectorSpec("params", plan.schema.size) not in broadcast:
        raise InvalidTask(f"the model has {plan.schema.size} parameters, the broadcast is {broadcast}")
    kept = checkpoint.specs_of(trip.init_client(state["params"])) if keeps_client_state(trip) else ()
    if set(kept) != set(plan.kept):
        raise InvalidTask(f"the algorithm keeps {kept} on devices, the plan {plan.kept}")
    layout = plan.report.decoded
    try:
        after = aggregate(layout, trip, state, np.ones(layout.size), ServerStep(layers=plan.schema.layers))
    except (KeyError, ValueError, ReportError, NonFiniteState) as error:
        raise InvalidTask(f"the algorithm cannot be applied to the plan's report: {error!r}") from error
    if checkpoint.specs_of(after.state) != checkpoint.specs_of(state):
        raise InvalidTask("the algorithm changes the shape of its own state")
