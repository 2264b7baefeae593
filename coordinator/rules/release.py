"""Release check: whether a plan may go to a task's devices, and whether settings fit it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from coordinator.errors import InvalidTask, demand
from coordinator.rules.aggregation import check_room
from coordinator.rules.entities import Task
from coordinator.rules.kinds import check_question
from coordinator.rules.private_sums import check_device_noise, check_private, report_bytes
from coordinator.rules.task_settings import FootprintBudget, TaskSettings
from fedcore.algorithms.algorithm import Algorithm, Report, ServerStep, check_two_trips, trips_of
from fedcore.algorithms.rehearsal import Bowl, contribute, for_any_model, moves_by_participation, received
from fedcore.bundle import Certificate, Evidence, Footprint
from fedcore.masking import fixed_points
from fedcore.plan import Plan
from fedcore.release import Release, ReleasedEvaluation, Signed, decode_release
from fedcore.report import ReportLayout
from fedcore.signing import verified

# What each part of the budget bounds, its unit, and how a plan comes to have less of it.
_FIGURES = {
    "peak_rss_mb": ("memory at the peak", "MB", "export a smaller model or a smaller batch_size"),
    "step_cpu_ms": ("CPU time of a step", "ms", "export a smaller model or a smaller batch_size"),
    "graph_bytes": ("size of all graphs", "bytes", "export a smaller model"),
}

OTHER_LINEAGE = "another lineage key"
"""What the reason of a task begins with that is paused until the key is back which its release or its noise names."""
_EXPIRED = "the release has expired: create the task anew with a new one"


def check_release(plan: Plan, certificate: Certificate, settings: TaskSettings) -> None:
    """Hold a plan and its certificate against what the task asks of them.

    Raises InvalidTask naming the format, what was found, what is allowed, and what to do.
    """
    for fmt in settings.formats:
        if fmt not in plan.graphs:
            raise InvalidTask(
                f"the task needs graphs in format {fmt!r}, the plan has {', '.join(sorted(plan.graphs)) or 'none'}: "
                f"export it for {fmt!r} too, or name other formats for the task"
            )
    # A device may run any format of the plan, so those that the task does not name count as well.
    for fmt in sorted(plan.graphs):
        evidence = certificate.formats.get(fmt)
        if evidence is None or not evidence.parity:
            raise InvalidTask(f"the certificate has no evidence for format {fmt!r}: export the plan again")
        _check_parity(fmt, evidence)
        _check_footprint(fmt, evidence.footprint, settings.budget)
    sent = max(report_bytes(trip.report, settings).sent for trip in plan.trips)
    if settings.budget.report_bytes is not None and sent > settings.budget.report_bytes:
        raise InvalidTask(
            f"a report has {_number(sent)} bytes, the budget {_number(settings.budget.report_bytes)} bytes "
            "(report_bytes): export a smaller model or compress its reports (--compress), or raise the budget"
        )


def released_seed(plans: Sequence[Plan], settings: TaskSettings) -> int | UnsetType:
    """The seed in the release of these plans: the task's if one has codecs, else none."""
    coded = any(trip.report.has_codecs for plan in plans for trip in plan.trips)
    return settings.seed if coded else UNSET


def check_signed(task: Task, wanted: Release | None, at: float) -> None:
    """Hold the signed release of a task with secure aggregation against what the task would do. Others need none.

    wanted: the release that the task needs; lineage, counter and expiry are the signer's to choose. at: now, in seconds
    since 1970. Raises InvalidTask naming what differs, or fedcore's errors when the release is not its signer's.
    """
    signed = task.release
    if wanted is None:
        if signed is not None:
            raise InvalidTask("a release is for tasks with secagg: create this one without it")
        return
    if signed is None:
        raise InvalidTask(
            "a task with secagg needs a signed release, or devices refuse it: make a key with `muster key new`, keep "
            "it apart from the coordinator, and sign with it: --release-key, or `muster task release`, for "
            "`muster task create --release` and the dashboard"
        )
    release = verified(signed, Release)
    for name in ("population", "plan", "checkpoint", "bounds", "evaluation", "seed"):
        released, value = getattr(release, name), getattr(wanted, name)
        if released != value:
            raise InvalidTask(
                f"{name} of the release is {_told(released)}, the task's is {_told(value)}: sign it again"
            )
    if release.expires_at <= at:
        raise InvalidTask(_EXPIRED)


def obstacle(signed: Signed, lineage: str, at: float) -> str:
    """Why devices would refuse a task's release, or its next checkpoint; empty when they would not.

    lineage: the public key with which the coordinator signs checkpoints. at: now, in seconds since 1970.
    """
    release = decode_release(signed.text)
    if release.lineage != lineage:
        return (
            f"{OTHER_LINEAGE}: the release names {release.lineage}, this coordinator has {lineage}: put the file with "
            "the right key back, and the task goes on, or create it anew"
        )
    return _EXPIRED if release.expires_at <= at else ""


def _told(value: object) -> object:
    if isinstance(value, ReleasedEvaluation):
        return f"by plan {value.plan[:12]}… with {value.bounds} and constants {sorted(value.constants)}"
    return "not there" if value is UNSET else value


def _check_parity(fmt: str, evidence: Evidence) -> None:
    for parity in evidence.parity:
        # Written so that NaN fails too.
        if not parity.l2 <= evidence.tolerance < math.inf:
            raise InvalidTask(
                f"graph {parity.graph!r} in format {fmt!r} is {parity.l2:.1e} from its reference, "
                f"the tolerance is {evidence.tolerance:.1e}: export the plan again"
            )


def _check_footprint(fmt: str, footprint: Footprint, budget: FootprintBudget) -> None:
    for name, (figure, unit, remedy) in _FIGURES.items():
        measured, allowed = getattr(footprint, name), getattr(budget, name)
        if allowed is not None and not measured <= allowed:
            raise InvalidTask(
                f"{figure} of format {fmt!r} is {_number(measured)} {unit}, the budget {_number(allowed)} {unit} "
                f"({name}): {remedy}, or raise the budget"
            )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# A trial of an algorithm under the rounding of secure rounds: whether rounding swamps it. Pure.
#
# A sum of fixed-point numbers is off by the same amount in every value, however small the value is. Means that are only
# added bear that. An algorithm that divides by a mean, or by its root, does not, where the mean is smaller than the
# rounding: an average of squares, say. Nothing in a plan shows that, so the algorithm is run, on bowls in float64, with
# exact means and with rounded ones.

_VALUES, _DEVICES, _ROUNDS = 256, 8, 3
"""Parameters of a bowl, half of which have no gradient, as the weights of dead units; bowls; rounds of every trip."""

Vector_D = NDArray[np.float64]


def check_rounding(algorithm: Algorithm, step: float, devices: int, parameters: int) -> None:
    """Refuse an algorithm whose model would be moved as far by the rounding of secure rounds as by training.

    step: the difference of neighbouring fixed-point numbers, as `fedcore.masking` makes them. devices: in a sum, at
    least. parameters: of the model. Raises InvalidTask with the numbers and what to change.
    """
    error = rounding(step, devices)
    moved = moved_by(algorithm, error, parameters)
    if not moved < 1:
        far = f"{moved:.1f} times as far as training does" if math.isfinite(moved) else "to numbers that are not finite"
        raise InvalidTask(
            f"secure aggregation rounds every mean to {error:.1e} (steps of {step:.1e} by clip_norm and bits, "
            f"{devices} devices), and in a trial of {algorithm.name} with gradients of length 1 over {parameters} "
            f"parameters that moved the model {far}: what it divides by, or reports, is too small for that. Lower "
            "clip_norm to the length of a report, raise bits or minimum, raise the algorithm's steps or the floor of "
            "its divisor (epsilon, tau), or create the task without secagg"
        )


def rounding(step: float, devices: int) -> float:
    """The deviation of a value of the mean over devices that all have the greatest weight, at its worst."""
    return step / 2 / math.sqrt(devices)


def moved_by(algorithm: Algorithm, error: float, parameters: int) -> float:
    """How far means that are off by `error` move a model, relative to its whole movement; 0 if it does not move."""
    source = np.random.default_rng(0)
    centres_KD = source.standard_normal((_DEVICES, _VALUES)) + source.standard_normal(_VALUES)
    centres_KD[:, : _VALUES // 2] = 0
    centres_KD /= math.sqrt(parameters)
    with np.errstate(all="ignore"):
        exact = _trained(algorithm, centres_KD, lambda mean: mean)
        rounded = _trained(algorithm, centres_KD, partial(_off, error, source))
    way = float(np.linalg.norm(exact))
    return float(np.linalg.norm(rounded - exact)) / way if way else 0.0


def _off(error: float, source: np.random.Generator, mean: Report) -> Report:
    return {name: value + error * source.standard_normal(np.shape(value)) for name, value in mean.items()}


def _trained(algorithm: Algorithm, centres_KD: Vector_D, rounded: Callable[[Report], Report]) -> Vector_D:
    """The model after some rounds from 0, on devices with a bowl around each centre."""
    algorithm = for_any_model(algorithm)
    state = algorithm.init(np.zeros(_VALUES))
    for _ in range(_ROUNDS):
        for trip in trips_of(algorithm):
            broadcast = received(algorithm, trip.broadcast(state))
            reports = [contribute(trip, broadcast, Bowl(centre_D, centre_D)) for centre_D in centres_KD]
            mean = {name: np.mean([report[name] for report in reports], 0) for name in reports[0]}
            state = trip.update(state, rounded(mean), ServerStep(devices=len(reports)))
    params_D: Vector_D = state["params"]
    return params_D


def check_settings(settings: TaskSettings, algorithm: Algorithm, plan: Plan) -> None:
    """Raise InvalidTask, or fedcore's InvalidSetting, saying which setting does not fit and what to change."""
    if settings.same_cohort:
        check_two_trips(algorithm)
    _check_clients(settings, algorithm)
    check_question(settings, algorithm)
    if settings.buffered is not None:
        _check_buffered(algorithm, plan)
    if settings.secagg is not None:
        _check_whole_values(plan)
        for trip in plan.trips:
            check_device_noise(trip.report, settings)
        check_masked_rounding(settings, algorithm, [trip.report for trip in plan.trips], plan.schema.size)
    if settings.privacy is not None:
        check_private(settings, algorithm, plan)
    for trip in plan.trips:
        check_room(settings.clear, trip.report, settings.largest_goal)


def _check_clients(settings: TaskSettings, algorithm: Algorithm) -> None:
    asks = moves_by_participation(algorithm)
    if asks and settings.clients is None:
        raise InvalidTask(
            f"algorithm {algorithm.name} moves by the share of all devices that a round counts: say with clients how "
            "many devices take part in the task, as near as you know"
        )
    demand(asks or settings.clients is None, "clients", f"left out with {algorithm.name}", settings.clients)


def check_descent(settings: TaskSettings, ancestors: Sequence[Task], *, evaluated: bool) -> None:
    """Raise InvalidTask unless held-out devices stay apart from the training of a model and of its descendants.

    ancestors: the tasks of the same population that trained the model from which the task starts, one after the other.
    evaluated: whether the held-out devices measure the task's own models while it trains.
    """
    if not ancestors:
        return
    task = min(ancestors, key=_kept_apart)
    theirs, ours = _kept_apart(task), settings.hold_out_devices
    wording = f"{theirs:g}, the share of devices that task {task.id} kept apart when it trained this model"
    if settings.on_held_out or evaluated:
        demand(ours <= theirs, "hold_out_devices", f"at most {wording}", ours)
    if not settings.on_held_out:
        demand(ours >= theirs, "hold_out_devices", f"at least {wording}", ours)


def _kept_apart(task: Task) -> float:
    """The share of devices that are surely not among those that a task trained on, if it changed the model."""
    return 0.0 if task.settings.on_held_out else task.settings.hold_out_devices


def check_masked_rounding(
    settings: TaskSettings, algorithm: Algorithm, layouts: Sequence[ReportLayout], parameters: int
) -> None:
    """Raise InvalidTask for an algorithm that does not bear the rounding of its masked reports.

    settings: with secagg. layouts: of the reports of each trip. parameters: of the model.
    """
    bounds = settings.sum_bounds
    steps = [point.step for layout in layouts for point in fixed_points(layout, bounds) if point.weighted]
    if steps:  # segments with ranges have the precision that the algorithm asks for
        check_rounding(algorithm, max(steps), bounds.min_sum, parameters)


def _check_whole_values(plan: Plan) -> None:
    for trip in plan.trips:
        if trip.report.bits:
            raise InvalidTask(
                f"the plan rounds reports in the clear to {trip.report.bits} bits, each with its own range, and what "
                "is summed under masks has one range for all: export it without bits=, and set the bits of secagg"
            )


def _check_buffered(algorithm: Algorithm, plan: Plan) -> None:
    if plan.kept:
        raise InvalidTask(
            f"algorithm {algorithm.name} keeps vectors on devices, which follow the model of the round that they were "
            "made in; in mode buffered a report counts in a later one: create the task without buffered"
        )
    if len(plan.trips) > 1:
        raise InvalidTask(
            f"algorithm {algorithm.name} has {len(plan.trips)} trips, which rounds take in turn; in mode buffered "
            "devices of several rounds work at once: take an algorithm of one trip"
        )
    if any(trip.report.has_codecs for trip in plan.trips):
        raise InvalidTask(
            "the plan has codecs, with a key for each round, and a sum in mode buffered is of several rounds: export "
            "it without them"
        )
