"""Readings of a bundle: the first checkpoint of a task on it, and the release that a key must sign for that."""

from __future__ import annotations

from collections.abc import Sequence

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
from fedcore.release import Release


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


def release_of(
    bundle: Bundle,
    settings: TaskSettings,
    lineage: str,
    *,
    counter: int,
    expires_at: int,
    algorithm_modules: Sequence[str] = (),
) -> Release:
    """What a release key must sign so that a task with these settings can run on the bundle.

    lineage: the public key with which the coordinator signs checkpoints. counter, expires_at: as in `Release`.
    algorithm_modules: as of `first_checkpoint`, whose errors it raises.
    """
    settings = with_least_noise(settings)
    return Release(
        population=settings.population,
        plan=bundle.manifest.plan.sha256,
        checkpoint=BlobRef.of(first_checkpoint(bundle, algorithm_modules)).sha256,
        bounds=settings.sum_bounds,
        seed=released_seed(bundle.plan, settings),
        lineage=lineage,
        counter=counter,
        expires_at=expires_at,
    )
