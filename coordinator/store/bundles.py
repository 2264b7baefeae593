"""Readings of a bundle: the first checkpoint of a task on it, and the release that a key must sign for that."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from coordinator.errors import InvalidTask
from coordinator.rules.aggregation import check_fit, check_sizes, state_specs
from coordinator.rules.private_sums import with_least_noise
from coordinator.rules.release import released_seed
from coordinator.rules.task_settings import TaskSettings
from fedcore import algorithms, checkpoint
from fedcore.algorithms.algorithm import trips_of
from fedcore.bundle import Bundle
from fedcore.errors import FedcoreError
from fedcore.plan import BlobRef
from fedcore.release import Release, ReleasedEvaluation


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
