"""The frame of benchmarks that train on a fleet: a coordinator, a plan and devices, in a temporary folder."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import PrivateFleetOptions, SecaggFleetOptions
from coordinator.store.tasks import Secagg, TaskSettings
from export.build import export_bundle
from export.model import Model
from fedcore.algorithms.algorithm import Algorithm
from fedcore.bundle import Bundle
from fedcore.params import Float32
from fedcore.signing import SigningKey
from muster.local.fleet import difference_from_engine, local_fleet
from muster.local.server import LocalCoordinator, local_coordinator
from muster.output import Say
from simulator.course import overall
from simulator.engine import Engine, evaluate
from simulator.fleet.fleet import FleetSummary, Session
from simulator.population import Population


@dataclass(frozen=True, slots=True)
class Training:
    """A task that a fleet trained: its id, the fleet's sessions, and their wall seconds."""

    task: str
    summary: FleetSummary
    seconds: float


@dataclass(frozen=True, slots=True)
class FleetTraining:
    """A coordinator, and a plan that devices of these users train. key: releases it for secure rounds."""

    folder: Path
    local: LocalCoordinator
    model: Model
    algorithm: Algorithm
    bundle: Bundle
    users: Population
    key: SigningKey

    def run(
        self, settings: TaskSettings, say: Say, on_session: Callable[[str], None] = lambda task: None, **fleet: Any
    ) -> Training:
        """Train a new task on all devices to its end. Raises SimulatorError as a fleet does.

        on_session: called with the task's id at the end of a session. fleet: fields of FleetConfig.
        """
        task = self.local.create_task(self.bundle, settings, self.key).id

        def on_end(session: Session) -> None:
            say(f"{session.client}: {session.ending}", 1)
            on_session(task)

        started = time.monotonic()
        devices = local_fleet(self.local, settings, self.users, self.key, self.folder / "devices", **fleet)
        summary = devices.run(on_end)
        return Training(task, summary, time.monotonic() - started)

    def difference(self, training: Training, engine: Engine) -> float:
        """The largest distance of the task's models from those of a fresh engine, which replays its rounds."""
        numbers = [record.number for record in self.local.committed(training.task)]
        return difference_from_engine(self.local, training.task, training.summary, engine, self.users, numbers)

    def accuracy(self, params: Float32, unseen: Population) -> float:
        """The accuracy of a model on users that took no part."""
        return overall(evaluate(self.model, params, unseen)["accuracy"], unseen)


def secure_settings(options: SecaggFleetOptions | PrivateFleetOptions, secagg: Secagg, **more: Any) -> TaskSettings:
    """A task whose rounds are secure and select all devices, of which seven in ten suffice. more: other settings."""
    return TaskSettings(
        goal=options.devices,
        minimum=max(8, options.devices * 7 // 10),
        over_selection=1.0,
        selection_timeout_s=3 * options.phase_s,
        reporting_deadline_s=10 * options.phase_s,  # five phases follow the training
        seed=options.seed,
        secagg=secagg,
        **more,
    )


@contextmanager
def fleet_training(
    model: Model, algorithm: Algorithm, users: Population, *, secure: bool = False
) -> Iterator[FleetTraining]:
    """A coordinator in a process of its own, with all files in a temporary folder. Raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="muster-fleet-") as place:
        folder = Path(place)
        bundle, key = export_bundle(model, algorithm, folder / "plan"), SigningKey.new(folder / "release.pem")
        with local_coordinator(folder / "coordinator", secure=secure) as local:
            yield FleetTraining(folder, local, model, algorithm, bundle, users, key)
