"""Settings of a task against its plan, its algorithm and the tasks before it: what does not fit is refused. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.errors import InvalidTask, demand
from coordinator.rules.clear_reports import check_room
from coordinator.rules.entities import Task
from coordinator.rules.packed_segments import check_device_noise
from coordinator.rules.private_sums import check_private
from coordinator.rules.questions import check_question
from coordinator.rules.rounding_trial import check_rounding
from coordinator.rules.task_settings import TaskSettings
from fedcore.algorithms.algorithm import Algorithm, check_two_trips
from fedcore.algorithms.rehearsal import moves_by_participation
from fedcore.masking import fixed_points
from fedcore.plan import Plan
from fedcore.report import ReportLayout


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
