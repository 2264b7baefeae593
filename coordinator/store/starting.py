"""Starts of tasks: from a bundle or from a model of another task, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import safetensors.numpy
from msgspec import UNSET

from coordinator.errors import InvalidTask
from coordinator.rules.aggregation import check_fit, check_sizes, state_specs
from coordinator.rules.entities import Task
from coordinator.rules.kinds import check_same_tensors
from coordinator.rules.private_sums import with_least_noise
from coordinator.rules.release import released_seed
from coordinator.rules.states import RoundState
from coordinator.rules.task_settings import TIME, TaskSettings
from fedcore import algorithms, checkpoint
from fedcore.algorithms.algorithm import Algorithm, trips_of
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.question import QUESTION
from fedcore.bundle import Bundle
from fedcore.errors import FedcoreError
from fedcore.plan import BlobRef, Plan
from fedcore.privacy.settings import Spending
from fedcore.release import Release, ReleasedEvaluation

if TYPE_CHECKING:
    from coordinator.operations import TaskStore, TrainedTasks


def first_checkpoint(bundle: Bundle, algorithm_modules: Sequence[str] = ()) -> bytes:
    """The checkpoint that devices receive in round 1 of a task on the bundle.

    algorithm_modules: those from which an algorithm that is not built in may be imported.

    Raises InvalidTask when plan, algorithm and initial state do not fit each other, and fedcore's errors.
    """
    plan, named = bundle.plan, bundle.manifest.algorithm
    algorithm = algorithms.create(named.name, named.settings, algorithm_modules)
    check_sizes(plan, bundle.manifest.state.size)
    try:
        state = checkpoint.decode(bundle.read(bundle.manifest.state), state_specs(plan, algorithm))
    except FedcoreError as error:
        raise InvalidTask(f"the bundle's initial state is not one of {algorithm.name}: {error}") from error
    check_fit(plan, algorithm, state)
    return checkpoint.encode(trips_of(algorithm)[0].broadcast(state))


def release_of(  # noqa: PLR0913  # a release says so much
    bundle: Bundle,
    settings: TaskSettings,
    lineage: str,
    *,
    counter: int,
    expires_at: int,
    algorithm_modules: Sequence[str] = (),
    evaluation: Bundle | None = None,
) -> Release:
    """What a release key must sign so that a task with these settings can run on the bundle.

    lineage: the public key with which the coordinator signs checkpoints. counter, expires_at: as in `Release`.
    algorithm_modules: as of `first_checkpoint`, whose errors it raises. evaluation: the bundle that evaluates models of
    the task, if any does.
    """
    settings = with_least_noise(settings)
    return Release(
        population=settings.population,
        plan=bundle.manifest.plan.sha256,
        checkpoint=BlobRef.of(first_checkpoint(bundle, algorithm_modules)).sha256,
        bounds=settings.sum_bounds,
        evaluation=UNSET if evaluation is None else _evaluation_of(evaluation, settings, algorithm_modules),
        seed=released_seed([one.plan for one in (bundle, evaluation) if one is not None], settings),
        lineage=lineage,
        counter=counter,
        expires_at=expires_at,
    )


def _evaluation_of(bundle: Bundle, settings: TaskSettings, algorithm_modules: Sequence[str]) -> ReleasedEvaluation:
    """The evaluation of models of a task with these settings: its sums have the bounds of the training's."""
    received = checkpoint.decode(first_checkpoint(bundle, algorithm_modules), bundle.plan.broadcast)
    constants = {name: checkpoint.digest(vector) for name, vector in received.items() if name != "params"}
    return ReleasedEvaluation(plan=bundle.manifest.plan.sha256, bounds=settings.sum_bounds, constants=constants)


def start_of(settings: TaskSettings) -> float:
    """When a task with these settings starts; 0 where nothing says so. Raises InvalidTask for a day that is none."""
    if settings.starts_at is None:
        return 0.0
    try:
        return datetime.fromisoformat(settings.starts_at).timestamp()
    except ValueError as error:
        raise InvalidTask(f"starts_at must be {TIME}, not {settings.starts_at!r}: {error}") from error


def round_of(store: TrainedTasks, source: str, forms: str = "TASK or TASK@ROUND") -> tuple[str, int]:
    """The task and the round of `TASK@ROUND`; of `TASK`, its last committed round, 0 for none.

    forms: what else a source may be, in words. Raises InvalidTask, and UnknownTask for `TASK`.
    """
    task, at, number = source.partition("@")
    if at and not number.isdecimal():
        raise InvalidTask(f"{source!r} names no round: give {forms}")
    committed = [] if at else [one.number for one in store.rounds(task) if one.state is RoundState.COMMITTED]
    return task, int(number) if at else max(committed, default=0)


def trained_round(store: TrainedTasks, source: str) -> tuple[str, int]:
    """The same of a task that is there, and has trained its model. Raises InvalidTask and UnknownTask."""
    task, number = round_of(store, source)
    store.task(task)
    if number == 0:
        raise InvalidTask(f"task {task} has committed no round yet: there is no trained model to begin at")
    return task, number


def started(
    store: TrainedTasks,
    bundle: Bundle,
    settings: TaskSettings,
    algorithm: Algorithm,
    read: Callable[[str, int], bytes],
    folder: Path,
) -> tuple[Bundle, TaskSettings]:
    """The bundle in the state in which a task with these settings starts, and the settings with the model's round.

    algorithm: of the bundle. read: gives the model of a task after a round, as `TaskStore.model` does. folder: where
    the bundle is written, if the task begins at a model.

    Raises InvalidTask when the tensors differ, or the algorithm trains no model; UnknownTask; UnknownRound.
    """
    if settings.starts_from is None:
        return bundle, settings
    if algorithm.family == EVALUATION:
        raise InvalidTask(f"{algorithm.name} evaluates a model and begins at none: leave starts_from out")
    if algorithm.family == QUESTION:
        raise InvalidTask(f"{algorithm.name} asks and trains no model, so it begins at none: leave starts_from out")
    source, number = trained_round(store, settings.starts_from)
    plan, manifest = bundle.plan, bundle.manifest
    check_same_tensors(f"task {source}", Plan.decode(store.plan_part(source)), plan)
    params_D = plan.schema.flatten(safetensors.numpy.load(read(source, number)))
    state = checkpoint.encode(algorithm.init(params_D))
    others = [data for ref, data in bundle.blobs() if ref != manifest.state]
    made = Bundle.write(folder, msgspec.structs.replace(manifest, state=BlobRef.of(state)), [state, *others])
    return made, replace(settings, starts_from=f"{source}@{number}")


def before(store: TaskStore, settings: TaskSettings) -> Iterator[tuple[Task, int]]:
    """The tasks before one with these settings, each with the round at whose model the next one began; nearest first.

    Of tasks before one without privacy nothing is said: no certificate bounds what their models reveal.
    """
    while settings.starts_from is not None:
        source, number = round_of(store, settings.starts_from)
        task = store.task(source)
        yield task, number
        if task.settings.privacy is None:
            return
        settings = task.settings


def spent_before(store: TaskStore, settings: TaskSettings) -> Spending | None:
    """What the tasks before one with these settings have spent, all together; None where there are none."""
    total: Spending | None = None
    for task, number in before(store, settings):
        privacy, epsilon = task.settings.privacy, [one.epsilon for one in store.spent(task.id) if one.number <= number]
        own = Spending.unbounded() if privacy is None else Spending(max(epsilon, default=0.0), privacy.delta)
        total = own if total is None else total.with_(own)
    return total
