"""Aggregation: bounds on reports, plain and robust means, and the next server state, in float64.

Legend: D parameters, L values of a report. Spec: docs/spec/rounds.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from coordinator.errors import InvalidTask, NonFiniteState
from coordinator.rules.task_settings import ClearReports, TaskSettings
from fedcore import checkpoint, codecs
from fedcore.algorithms.algorithm import Algorithm, ServerStep, Trip, figures_of, keeps_client_state, trips_of
from fedcore.algorithms.facts import with_local
from fedcore.codecs import RoundKey
from fedcore.errors import ReportError
from fedcore.masking import fixed_point, greatest_weight
from fedcore.params import FLOAT_BYTES, Float32, VectorSpec
from fedcore.plan import Plan
from fedcore.report import LOSS_COUNTS, LOSSES, WEIGHT, ReportLayout, Segment
from fedcore.schedule import Range, Weighting

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

    losses: how many devices reached each level of loss, where the plan counts them (`fedcore.algorithms.evaluation`).
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


# Robust aggregation: estimates of the mean that a few false reports cannot move far. It keeps reports one by one.
#
# Legend: K reports, L values of a report, B values of a block. Spec: docs/spec/rounds.md §8.
#
# Trimmed mean and median: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning", ICML 2018. Krum:
# Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries", NeurIPS 2017. All count every report
# alike, whatever its weight, and all are biased where devices' examples differ.

Float64 = NDArray[np.float64]

"""Values of each report that are looked at together, so that little memory is needed beside the reports."""


class KeptReports:
    """The reports of a round, one by one. `total` is what `ReportSum` would have if each were the estimate.

    It is computed once: a round that cannot be committed yet, as the database is locked, is tried again and again.
    """

    def __init__(self, layout: ReportLayout, clear: ClearReports) -> None:
        self._layout = layout
        self._clear = clear
        self._reports: list[Float32] = []
        self._total: Float64 | None = None

    def add(self, *reports_KL: NDArray[np.floating[Any]]) -> None:
        """Keep copies of reports: their memory is used again as soon as they are answered."""
        self._reports += [np.array(report, np.float32) for report in reports_KL]
        self._total = None

    def total(self) -> Float64:
        """Float64 (L,): mean segments the estimate times the summed weight, but those with ranges; all others as they
        are.
        """
        if self._total is None:
            self._total = self._computed()
        return self._total

    def _computed(self) -> Float64:
        slices = self._layout.slices()
        weight_at = next(where.start for segment, where in slices if segment.name == WEIGHT)
        weights_K = np.array([float(report[weight_at]) for report in self._reports])
        total_L = np.zeros(self._layout.size)
        chosen = self._nearest(weights_K) if self._clear.estimator == "krum" else None
        for block in _blocks(self._layout, normed=False):
            total_L[block] = self._block(block).sum(axis=0)
        for block in _blocks(self._layout, normed=True):
            means_KB = self._block(block) / weights_K[:, None]
            total_L[block] = weights_K.sum() * (means_KB[chosen] if chosen is not None else self._estimate(means_KB))
        return total_L

    def _estimate(self, means_KB: Float64) -> Float64:
        if self._clear.estimator == "median":
            return np.asarray(np.median(means_KB, axis=0))
        cut = self._clear.tolerate
        return np.asarray(np.sort(means_KB, axis=0)[cut : len(means_KB) - cut].mean(axis=0))

    def _nearest(self, weights_K: Float64) -> int:
        """Krum: the report with the least sum of squared distances to the K - f - 2 that are nearest to it."""
        count = len(weights_K)
        products_KK = np.zeros((count, count))
        for block in _blocks(self._layout, normed=True):
            means_KB = self._block(block) / weights_K[:, None]
            products_KK += means_KB @ means_KB.T
        squares_K = products_KK.diagonal()
        distances_KK = np.maximum(squares_K[:, None] + squares_K - 2 * products_KK, 0)
        nearest = np.sort(distances_KK, axis=1)[:, 1 : count - self._clear.tolerate - 1]
        return int(nearest.sum(axis=1).argmin())

    def _block(self, block: slice) -> Float64:
        return np.stack([report[block] for report in self._reports]).astype(np.float64)


def collector(layout: ReportLayout, clear: ClearReports) -> ReportSum | KeptReports:
    """The container for a round's reports: their sum, unless an estimator needs them one by one."""
    return ReportSum(layout.size) if clear.estimator == "mean" else KeptReports(layout, clear)


def _blocks(layout: ReportLayout, *, normed: bool) -> Iterator[slice]:
    """The segments that are held to a norm, or the others, in pieces."""
    for segment, where in layout.slices():
        if segment.normed is normed:
            for begin in range(where.start, where.stop, _BLOCK):
                yield slice(begin, min(begin + _BLOCK, where.stop))


# Reports in the clear: the bounds on each of them, so that no single device decides the next model. Pure.
#
# Legend: L values of a report. Spec: docs/spec/rounds.md §8.

SLACK = 2.0
"""How far above its average length an honest update may be when decoded: which part of it travels is random."""
MOST_KEPT, MOST_KEPT_BYTES = 500, 1 << 28
"""The most reports of a round that are kept one by one, and their memory: the driver reads all when the round ends."""


def check_room(clear: ClearReports, layout: ReportLayout, goal: int) -> None:
    """Raise InvalidTask when the reports of a round are more than may be kept one by one."""
    most = min(MOST_KEPT, MOST_KEPT_BYTES // (layout.size * FLOAT_BYTES))
    if clear.estimator != "mean" and goal > most:
        raise InvalidTask(
            f"estimator {clear.estimator} keeps every report of a round, and of {layout.size:,} values it may keep "
            f"{most}: lower the goal from {goal} to that, take a smaller model, or the mean"
        )


def bounded_report(
    clear: ClearReports, report_L: NDArray[np.floating[Any]], layout: ReportLayout, key: RoundKey
) -> NDArray[np.floating[Any]]:
    """A report (L,) within the bounds: the same array when it is, else a copy that is scaled down or clamped.

    Each value of a segment with a range is held to it. A weight that is too great scales the whole report, so that
    means and metrics count as those of the lower one.
    key: of the codecs of the report's round.
    """
    slices = layout.slices()
    weight = next(float(report_L[where][0]) for segment, where in slices if segment.name == WEIGHT)
    heavy = weight > clear.max_weight
    factors = [
        (where, _factor(clear.max_norm * weight, segment, report_L[where], key, index))
        for index, (segment, where) in enumerate(slices)
        if segment.normed
    ]
    long = [(where, factor) for where, factor in factors if factor < 1]
    beyond = [
        (where, within)
        for segment, where in slices
        if (within := segment.range) is not UNSET and _leaves(within, report_L[where])
    ]
    if not heavy and not long and not beyond:
        return report_L
    bounded_L = report_L.astype(np.float64)
    for where, factor in long:
        bounded_L[where] *= factor
    for where, within in beyond:
        bounded_L[where] = np.clip(bounded_L[where], within.low, within.high)
    if heavy:
        bounded_L *= clear.max_weight / weight
    return bounded_L


def _factor(most: float, segment: Segment, values_C: NDArray[np.floating[Any]], key: RoundKey, index: int) -> float:
    """The factor that brings a mean segment within the L2 norm `most`; 1 if it is. index: its place in the layout."""
    stretch = codecs.stretch(segment.codecs)
    norms = [(_norm(values_C), most if stretch == 1 else SLACK * stretch * most)]
    if not codecs.keep_norms(segment.codecs):
        # In float64, in which what is made of finite float32 overflows nowhere.
        decoded = codecs.decoded_norm(segment.codecs, values_C.astype(np.float64), segment.size, key, index)
        norms.append((decoded, longest(segment, most)))
    return min([1.0, *(most / norm for norm, most in norms if norm > most)])


def _leaves(within: Range, values: NDArray[np.floating[Any]]) -> bool:
    """Whether a value is outside the range, whose ends are rounded to the values' precision as on a device."""
    return bool((values < within.low).any() or (values > within.high).any())


def longest(segment: Segment, norm: float) -> float:
    """The L2 norm to which a decoded mean segment is held where an update that is `norm` long must pass.

    Codecs send a part of an update and scale it up: decoded, it is √growth times as long on average. A false report
    made for that is growth times as long.
    """
    if codecs.keep_norms(segment.codecs):
        return norm
    growth = codecs.growth(segment.codecs, segment.size)
    return norm * min(growth, SLACK * math.sqrt(growth))


def _norm(values: NDArray[np.floating[Any]]) -> float:
    """The L2 norm; in the values' own precision, as long as their squares neither overflow nor vanish in it."""
    with np.errstate(over="ignore", under="ignore"):
        square = float(values @ values)
    precision = np.finfo(values.dtype)
    # What vanishes is at most the smallest normal number for each value: below this it could be part of the norm.
    least = values.size * float(precision.tiny) / float(precision.eps)
    if least <= square < math.inf:
        return math.sqrt(square)
    return float(np.linalg.norm(values.astype(np.float64))) if values.any() else 0.0


# The longest update that a task counts, and the sums of secure rounds that are held to it. Pure.
#
# Spec: docs/spec/rounds.md §8. Legend: L values of a decoded report.


def in_words(plan: Plan, settings: TaskSettings) -> str:
    """The L2 norm above which an update of a task, decoded and over its weight, is scaled down; empty with noise.

    With noise of devices there is no such norm: noise may be any part of a sum. Nor is there where all segments have
    ranges.
    """
    if settings.secagg is not None and settings.privacy is not None:
        return ""
    norm = settings.clear.max_norm if settings.secagg is None else settings.secagg.clip_norm
    segments = [segment for trip in plan.trips for segment in trip.report.segments if segment.normed]
    if not segments:
        return ""
    most = f"{max(longest(segment, norm) for segment in segments):,.4g}"
    if settings.secagg is None:
        return f" Decoded, its update counts with a length of {most} at most."
    return f" Decoded, the mean of a round counts with a length of {most} at most, and what rounding adds."


def held_sum(
    settings: TaskSettings, layout: ReportLayout, decoded_L: NDArray[np.float64], devices: int
) -> NDArray[np.float64]:
    """A decoded sum of masked reports with its mean segments scaled down to what honest devices may come to.

    layout: of the reports as they travel. devices: whose reports they are. Reports in the clear were bounded one by
    one, and secure aggregation has bounded segments whose norms codecs keep.
    """
    if settings.secagg is None or settings.privacy is not None:
        return decoded_L
    ranges = dict(zip((segment.name for segment in layout.segments), layout.decoded.slices(), strict=True))
    weight, w_max = float(decoded_L[ranges[WEIGHT][1]][0]), greatest_weight(layout, settings.sum_bounds)
    held_L = decoded_L.copy()
    for segment in layout.unweighted:
        if segment.normed and not codecs.keep_norms(segment.codecs):
            # The deviation of a value that is rounded at random is half a step at most. Twice that is slack.
            rounding = w_max * fixed_point(segment, settings.sum_bounds).step * math.sqrt(devices * segment.coded_size)
            most = weight * longest(segment, settings.secagg.clip_norm)
            most += codecs.growth(segment.codecs, segment.size) * rounding
            where = ranges[segment.name][1]
            norm = float(np.linalg.norm(held_L[where]))
            held_L[where] *= min(1.0, most / norm) if norm else 1.0
    return held_L
