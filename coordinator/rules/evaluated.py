"""The models that a task evaluates, where they came from, and what such a task may be. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import msgspec

from coordinator.errors import InvalidTask
from coordinator.rules.entities import LONGEST_NAME, Evaluates, ModelSource, RegularEvaluation, Snapshot, Task
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import ClearReports, TaskSettings
from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.question import QUESTION
from fedcore.params import ParamSchema, VectorSpec
from fedcore.plan import Plan
from fedcore.schedule import ServerSchedule

VECTORS = {"model": "params", "against": "other"}
"""The vector of the server state that holds each of the models."""


def sources(evaluates: Evaluates) -> dict[str, ModelSource]:
    """Where the evaluated models came from, by the vector of the server state that holds each."""
    named = msgspec.structs.asdict(evaluates)
    return {VECTORS[name]: source for name, source in named.items() if source is not None}


def check_evaluates(algorithm: Algorithm, state: tuple[VectorSpec, ...], against: ModelSource | None) -> None:
    """Raise InvalidTask unless the algorithm, with such a state, evaluates a model, or two with one to compare with."""
    if algorithm.family != EVALUATION:
        raise InvalidTask(
            f"{algorithm.name} trains a model and does not evaluate one: export the model with --algorithm=evaluate, "
            "compare or personalisation"
        )
    compares = VECTORS["against"] in [spec.name for spec in state]
    if compares and against is None:
        raise InvalidTask(f"{algorithm.name} needs a second model, to compare with: name it with --against")
    if not compares and against is not None:
        raise InvalidTask(f"{algorithm.name} evaluates one model: leave --against out, or export with compare")


def check_same_model(source: Task, its_plan: Plan, plan: Plan, settings: TaskSettings) -> None:
    """Raise InvalidTask unless a task with these settings and this plan may evaluate a model of the task `source`."""
    check_same_tensors(f"task {source.id}", its_plan, plan)
    if source.settings.privacy is not None and settings.privacy is None:
        raise InvalidTask(
            f"evaluation of a private task without noise is refused: task {source.id} promises privacy; give this one "
            "a budget too, --privacy"
        )


def check_same_tensors(training: str, its_plan: Plan, plan: Plan) -> None:
    """Raise InvalidTask unless this plan is for models that a task, in words, trains with its own plan."""
    if its_plan.schema != plan.schema:
        difference = _first_difference(its_plan.schema, plan.schema)
        raise InvalidTask(f"{training} trains another model than the bundle's plan: {difference}")
    if its_plan.frozen != plan.frozen:
        raise InvalidTask(f"{training} has other frozen tensors than the bundle's plan: export it from that model")


def _first_difference(theirs: ParamSchema, ours: ParamSchema) -> str:
    """The first tensor in which two models differ, in words."""
    for one, other in zip_longest(theirs.tensors, ours.tensors):
        if one != other:
            there, here = ("none" if it is None else f"{it.name} {list(it.shape)}" for it in (one, other))
            return f"it has the tensor {there}, the plan {here}"
    return f"it keeps {list(theirs.local)} on devices, the plan {list(ours.local)}"


def check_regular(
    settings: TaskSettings, training: Algorithm, measuring: Algorithm, state: tuple[VectorSpec, ...]
) -> None:
    """Raise InvalidTask unless `measuring`, with such a state, can regularly evaluate models of a task.

    settings, training: the settings of that task and its algorithm.
    """
    what = "evaluation after every N rounds"
    if VECTORS["against"] in [spec.name for spec in state]:
        raise InvalidTask(f"{what} is of one model, and {measuring.name} compares two: export with evaluate")
    check_evaluates(measuring, state, None)
    if training.family == EVALUATION:
        raise InvalidTask(f"{what} is for tasks that train, and {training.name} evaluates: create it without")
    if training.family == QUESTION:
        raise InvalidTask(f"{what} is for tasks that train, and {training.name} asks: create it without")
    if not settings.hold_out_devices or settings.on_held_out:
        raise InvalidTask(
            f"{what} runs on held-out devices, so that it measures on none that trained and delays no round: set "
            "hold_out_devices above 0, and leave on_held_out out"
        )
    if settings.privacy is not None:
        raise InvalidTask(
            f"{what} is refused with privacy: each would need noise and a budget of its own; create evaluations by "
            "hand, with --evaluate and --privacy"
        )


def settings_of_regular(training: TaskSettings, number: int) -> TaskSettings:
    """The settings of an evaluation of the model after a round: one round, with the goal of that round.

    What concerns training alone, such as bounds on updates and mode buffered, is as by default.
    """
    return replace(
        training.in_round(number),
        rounds=1,
        on_held_out=True,
        clear=ClearReports(),
        schedule=ServerSchedule(),
        same_cohort=False,
        buffered=None,
        starts_at=None,
        starts_from=None,
    )


def regular_task(training: Task, regular: RegularEvaluation, number: int, start: Snapshot, id_: str, at: float) -> Task:
    """The task that evaluates the model of a training after round `number`, under the same release, if any.

    start: with the signed entry of that round, under a release. at: now, in seconds since 1970.
    """
    bundle, ending = regular.bundle, f", round {number}"
    return Task(
        id=id_,
        name=training.name[: LONGEST_NAME - len(ending)] + ending,
        bundle=bundle.name,
        state=TaskState.ACTIVE,
        reason="",
        settings=settings_of_regular(training.settings, number),
        algorithm=bundle.algorithm,
        plan_sha256=bundle.plan.sha256,
        plan_signature=bundle.signature,
        certificate_sha256=bundle.certificate.sha256,
        release=training.release,
        initial=start,
        created_at=at,
        evaluates=Evaluates(ModelSource(task=training.id, round=number), lineage=start.lineage),
    )
