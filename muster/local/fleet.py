"""A fleet on this machine for a task of a local coordinator, and its comparison with the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.store.tasks import TaskSettings
from device_runtime.permission.policy import Policy
from fedcore.signing import SigningKey
from muster.local.server import LocalCoordinator
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig, FleetSummary
from simulator.population import Population
from simulator.proofs.fleet_against_engine import counted_cohort, worst_difference


def local_fleet(
    local: LocalCoordinator,
    settings: TaskSettings,
    users: Population,
    key: SigningKey,
    folder: Path,
    **more: Any,
) -> Fleet:
    """Devices of these users for a task with these settings, all online at once, with the task's seed.

    In secure rounds they accept only what `key` signed. folder: holds a folder of devices for each population. more:
    other fields of FleetConfig.
    """
    config = FleetConfig(
        coordinator=local.url,
        population=settings.population,
        folder=folder / settings.population,
        concurrency=len(users),
        seed=settings.seed,
        policy=Policy(signers=(key.signer,), require_secure_aggregation=True) if settings.secagg else None,
    )
    return Fleet(replace(config, **more), users)


def difference_from_engine(
    local: LocalCoordinator, task: str, summary: FleetSummary, engine: Engine, users: Population, rounds: Iterable[int]
) -> float:
    """The largest relative distance of the coordinator's models from those of a fresh engine.

    rounds: those that the engine replays: 1, 2, …, as for `worst_difference`.
    """
    numbers = list(rounds)
    cohorts = [counted_cohort(local.store, task, number, summary.clients) for number in numbers]
    models = [local.store.checkpoint(task, number)["params"] for number in numbers]
    return worst_difference(engine, users, cohorts, models)
