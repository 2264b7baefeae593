"""Fleets on this machine: one for a task of a local coordinator, and the end of the demo, where an app gets a model."""

from __future__ import annotations

import base64
import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.progress import Reason
from coordinator.rules.roll_outs import PREFIX
from coordinator.rules.states import TaskState
from coordinator.store.tasks import TaskSettings
from device_runtime.device import Device
from device_runtime.permission.policy import Policy
from device_runtime.state.folder import KeyFile, Sealer, device_key
from fedcore.batching import is_held_out
from fedcore.bundle import Bundle
from fedcore.params import Float32
from fedcore.signing import SigningKey
from muster.creating import Evaluated, starting_from
from muster.local.server import LocalCoordinator
from muster.releasing_models import Source, evaluation_of, keep, next_release, plan_of
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig, FleetSummary, device_in, state_folder
from simulator.fleet.fork_servers import JVM, ForkServers
from simulator.population import Population
from simulator.proofs import counted_cohort, worst_difference


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


# The end of the demo: held-out devices evaluate a model, it is released to all, and a device's app reads with it.


NAME = "digits"
"""The name of the released model."""
_LOOK_S = 0.02


class DemoFailed(Exception):
    """The demo did not come to its end: a task of it was not completed."""


@dataclass(frozen=True, slots=True)
class ReadDigit:
    """A digit that a device read. levels: of ink, 0 to 1, in rows. digit: what it is. share: the model's, of `read`."""

    levels: list[list[float]]
    digit: int
    read: int
    share: float


@dataclass(frozen=True, slots=True)
class AppResult:
    """A model's way to an app, and its seconds.

    devices: held-out ones, which evaluated it. accuracy, low, high: the mean over them, and its interval of 95 %.
    name, version: of the release, which all devices are given.
    """

    algorithm: str
    devices: int
    accuracy: float
    low: float
    high: float
    name: str
    version: int
    digits: list[ReadDigit]
    seconds: float


def choose_keys(folder: Path, settings: TaskSettings, users: Population, runtime: str = "python") -> None:
    """Make the keys of the users' devices, such that the hold-out of these settings puts all on the task's side.

    folder: of the population's devices. Which users are held out is given with the data, and devices are by a hash of
    their keys. runtime: of the devices.
    """
    for client in users.clients:
        state = state_folder(folder, client)
        state.mkdir(parents=True)
        sealer = Sealer(KeyFile(state / "sealing-key"))
        key = device_key(state, sealer)
        while is_held_out(settings.population, device_in(state), settings.hold_out_devices) != settings.on_held_out:
            (state / "device-key").unlink()
            key = device_key(state, sealer)
        if runtime == JVM:
            _give_to_kotlin(state, base64.b64encode(key.private_bytes_raw()).decode())


def _give_to_kotlin(state: Path, key: str) -> None:
    """Keep a key as `device_runtime/android/jvm/src/main/kotlin/State.kt` does."""
    with closing(sqlite3.connect(state / "state.db")) as database, database:
        database.execute("PRAGMA application_id = 0x4d734b74")
        database.execute("CREATE TABLE kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")
        database.execute("INSERT INTO kept VALUES ('key:device', ?)", (key,))


@dataclass(frozen=True, slots=True)
class AppTrip:
    """From a trained model to an app. users: of the held-out devices, whose files go to `folder`."""

    coordinator: LocalCoordinator
    key: SigningKey
    servers: ForkServers
    users: Population
    folder: Path

    def run(self, algorithm: str, source: Source, evaluation: Bundle, settings: TaskSettings) -> AppResult:
        """Evaluate a model, release it, and read with it. settings: of the evaluation. Raises DemoFailed."""
        started = time.monotonic()
        figures = self._evaluate(source, evaluation, settings)
        version = self._release(source, figures)
        digits = self._read(settings.population)
        low, mean, high = (figures[f"{PREFIX}accuracy.devices{end}"] for end in (".low", "", ".high"))
        devices = round(figures[f"{PREFIX}devices"])
        return AppResult(algorithm, devices, mean, low, high, NAME, version, digits, time.monotonic() - started)

    def _evaluate(self, source: Source, evaluation: Bundle, settings: TaskSettings) -> Mapping[str, float]:
        store = self.coordinator.store
        with starting_from(store, evaluation, Evaluated("@".join(map(str, source)), None)) as (bundle, origin):
            task = self.coordinator.create_task(bundle, settings, self.key, origin).id
            fleet = local_fleet(self.coordinator, settings, self.users, self.key, self.folder)
            while store.progress_of(task).reason is Reason.STARTING:  # devices would hear of no work, and end the fleet
                time.sleep(_LOOK_S)
            fleet.run(servers=self.servers)
        if store.task(task).state is not TaskState.COMPLETED:
            raise DemoFailed(f"the evaluation on held-out devices is {store.task(task).state}")
        return evaluation_of(store, task, source)

    def _release(self, source: Source, figures: Mapping[str, float]) -> int:
        store = self.coordinator.store
        params_D: Float32 = store.checkpoint(*source)["params"]
        plan = plan_of(store, source.task, None)
        release, parameters = next_release(
            store, source, NAME, plan, params_D, self.key, evaluation=figures, forbid_older=False
        )
        keep(store, parameters)
        version = store.release_model(self.key.sign_statement(release)).number
        store.promote_model(release.population, NAME, version, 1.0)
        return version

    def _read(self, population: str) -> list[ReadDigit]:
        """What a held-out device reads, in this process as an app would: the first of each digit that is held out."""
        client = self.users.clients[0]
        devices, policy = self.folder / population, Policy(signers=(self.key.signer,))
        examples, state = devices / client / "examples.npz", state_folder(devices, client)
        device = Device(self.coordinator.url, population, examples, state, policy=policy)
        shards = [self.users.shard(index) for index in range(len(self.users))]
        x, y = (np.concatenate([shard[name] for shard in shards]) for name in ("x", "y"))
        kinds, first = np.unique(y, return_index=True)
        with device.model(NAME) as model:
            model.refresh()
            shares = _shares(model.predict({"x": x[first]})["output"])
        return [
            ReadDigit(levels.tolist(), int(digit), int(share.argmax()), float(share.max()))
            for levels, digit, share in zip(x[first, 0], kinds, shares, strict=True)
        ]


def _shares(logits: NDArray[Any]) -> NDArray[Any]:
    """The softmax of each row (n, classes)."""
    powers: NDArray[Any] = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: NDArray[Any] = powers / powers.sum(axis=1, keepdims=True)
    return shares
