"""The demo on one machine: export, a coordinator, devices over HTTP, and the engine's replay as proof."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from prometheus_client.samples import Sample

from coordinator.rules.private_sums import ReportBytes, report_bytes
from coordinator.store.tasks import CoordinatorStore, Secagg, TaskSettings
from device_runtime.errors import Phase
from export.build import export_bundle
from export.model import Model
from export.models import load as load_model
from fedcore.algorithms import create, module_of, settings_of
from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.rehearsal import moves_by_participation
from fedcore.bundle import Bundle
from fedcore.errors import table_of
from fedcore.plan import prefixed
from fedcore.signing import SigningKey
from muster.local.fleet import AppResult, AppTrip, DemoFailed, choose_keys, difference_from_engine, local_fleet
from muster.local.server import LocalCoordinator
from muster.releasing_models import Source
from secagg.parameters import LEAST_COHORT
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.engine import Engine, evaluate
from simulator.fleet.fleet import FleetSummary, Session
from simulator.fleet.fork_servers import ForkServers
from simulator.fleet.profile import counted_kinds
from simulator.population import Population
from simulator.proofs import counted_cohort
from simulator.runs.reading import SECONDS
from simulator.runs.running import keep_run
from simulator.simulation import result_of
from simulator.training import ACCURACY, SERVER, Facts, Point, digest_of, measured

MODEL, DATASET, DEVICES = "digits_cnn", "digits", 60
# Found by a random search over 170 simulated runs of 25 rounds. Others run with their defaults.
SETTINGS: dict[str, dict[str, object]] = {
    "mimelite": {
        "optimizer": "adam",
        "client_lr": 0.008,
        "beta1": 0.3,
        "beta2": 0.9,
        "epsilon": 0.01,
        "epochs": 2,
        "batch_size": 4,
    },
    "fedadam": {"client_lr": 0.1, "server_lr": 0.03, "epochs": 2, "batch_size": 4},
    "fedavg": {"client_lr": 0.1, "epochs": 2, "batch_size": 4},
}
EVALUATION = "evaluate"
HELD_OUT_SHARE = 0.2
"""Of the population's devices: as many hold no example of training as there are held-out users."""
# The keystone compares this many rounds: float32 differences grow with every round, and more rounds prove no more.
REPLAYED_ROUNDS = 3
# Above the norm of any update or gradient of these settings, so nothing is clipped.
CLIP_NORM = 10.0
TRAINED_BY = "a fleet of emulated devices trained"


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The configuration. Of the 60 devices `devices` are active at a time; every round waits for that many reports.

    secure: mask reports, which needs LEAST_COHORT devices or more, and a coordinator with an authority. out: a folder
    that keeps a run of each algorithm, with its plan; None keeps nothing. runtime: of the devices that train.
    """

    algorithms: tuple[str, ...]
    rounds: int
    devices: int
    folder: Path
    seed: int = 0
    secure: bool = False
    out: Path | None = None
    runtime: Literal["python", "jvm"] = "python"

    @property
    def devices_folder(self) -> Path:
        """The folder with a folder of devices for each population."""
        return self.folder / "devices"


@dataclass(frozen=True, slots=True)
class AlgorithmResult:
    """One algorithm's run. report: bytes of one. bytes_up, bytes_down: per participating device, over the whole run.

    points: one a round, as in a simulation. seconds: of the fleet. sessions: those that reported. phases: their mean
    seconds (device_runtime/errors.py).
    """

    algorithm: str
    rounds: int
    test_accuracy: float
    report: ReportBytes
    bytes_up_per_device: float
    bytes_down_per_device: float
    seconds: float
    export_seconds: float
    replay_seconds: float
    agreement: float
    sessions: int
    phases: dict[Phase, float]
    points: list[Point]


@dataclass(frozen=True, slots=True, repr=False)
class DemoResult:
    """All runs, what came of the best model, and mean seconds of the steps of their rounds in the coordinator.

    Steps: docs/operations.md.
    """

    algorithms: list[AlgorithmResult]
    app: AppResult
    round_steps: dict[str, float]

    def __repr__(self) -> str:
        reached = ", ".join(f"{run.algorithm} {run.test_accuracy:.3f}" for run in self.algorithms)
        return f"DemoResult({reached}; {self.app.name} version {self.app.version} by {self.app.algorithm} in the app)"

    def _repr_html_(self) -> str:
        columns = ("algorithm", "rounds", "test_accuracy", "agreement", "bytes_up_per_device", "bytes_down_per_device")
        rows = [[getattr(run, name) for name in columns] for run in self.algorithms]
        return table_of([name.replace("_", " ") for name in columns], rows)


OnProgress = Callable[[str, int, str], None]
"""Called with the name of an algorithm, its number of committed rounds, and a note."""


def run_demo(
    config: DemoConfig, servers: ForkServers, started: Callable[[], LocalCoordinator], on_progress: OnProgress
) -> DemoResult:
    """Train with every algorithm in turn, and give the best model to an app.

    servers: where devices run. started: waits for the coordinator. Both start while this module is loaded and the first
    plan exported. While one algorithm trains, the next plan is exported and the previous run replayed.
    """
    train, test = datasets.users(DATASET, None, DEVICES)
    with ThreadPoolExecutor(1) as beside:
        exports = {name: beside.submit(_export, config, name) for name in (*config.algorithms, EVALUATION)}
        local = started()
        key = SigningKey.new(config.folder / "release.pem")
        trainer = Trainer(config, local, key, servers, train, test)
        runs, results = [], []
        for name in config.algorithms:
            on_progress(name, 0, "export")
            runs.append(trainer.train_fleet(exports[name].result(), on_progress))
            results.append(beside.submit(trainer.result, runs[-1]))
        steps = _means(local.samples("muster_round_step_seconds"), "step")
        best = max(runs, key=lambda run: run.points[-1][ACCURACY])
        on_progress(best.exported.name, config.rounds, "evaluate, release, predict")
        app = trainer.give_to_app(best, exports[EVALUATION].result().bundle)
        return DemoResult([result.result() for result in results], app, steps)


def _means(samples: Sequence[Sample], label: str) -> dict[str, float]:
    """The mean of a histogram for every value of its label."""
    values = {(sample.name.rpartition("_")[2], sample.labels[label]): sample.value for sample in samples}
    return {value: total / values["count", value] for (kind, value), total in values.items() if kind == "sum"}


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan with its model and algorithm. name: as the user wrote it. seconds: of the export."""

    name: str
    model: Model
    algorithm: Algorithm
    bundle: Bundle
    seconds: float


def _export(config: DemoConfig, name: str) -> Exported:
    started = time.monotonic()
    model, algorithm = Model(load_model(MODEL), config.seed), create(name, SETTINGS.get(name), [module_of(name)])
    bundle = export_bundle(model, algorithm, config.folder / f"plan-{algorithm.name}", MODEL)
    return Exported(name, model, algorithm, bundle, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class Run:
    """An algorithm's rounds on the fleet. points: one a round, as in a simulation. seconds: of all rounds."""

    exported: Exported
    task: str
    points: list[Point]
    fleet: FleetSummary
    seconds: float


def for_algorithm(settings: TaskSettings, algorithm: Algorithm, users: Population) -> TaskSettings:
    """The settings of a task with the number of its devices, where the algorithm asks for it."""
    return replace(settings, clients=len(users)) if moves_by_participation(algorithm) else settings


def demo_settings(
    population: str, goal: int, rounds: int, seed: int, users: Population, *, secure: bool
) -> TaskSettings:
    """Settings of a task with `goal` of these users at a time, all of which it draws."""
    # The shards are known here, so a tight bound on weights keeps precision.
    secagg = Secagg(clip_norm=CLIP_NORM, max_examples=int(users.sizes.max()), phase_s=10)
    return TaskSettings(
        population=population,
        goal=goal,
        rounds=rounds,
        purpose="This task teaches a model to read handwritten digits.",
        minimum=max(LEAST_COHORT if secure else 1, goal // 2),
        over_selection=1.0,
        selection_timeout_s=20,
        reporting_deadline_s=70 if secure else 20,  # 20 s to train
        seed=seed,
        secagg=secagg if secure else None,
    )


@dataclass(frozen=True, slots=True)
class Trainer:
    """Trains with one algorithm after another, on one fleet of users. key: releases their plans."""

    config: DemoConfig
    coordinator: LocalCoordinator
    key: SigningKey
    servers: ForkServers
    train: Population
    test: Population

    @property
    def store(self) -> CoordinatorStore:
        """The coordinator's store."""
        return self.coordinator.store

    def train_fleet(self, exported: Exported, on_progress: OnProgress) -> Run:
        """One algorithm's rounds. Raises DemoFailed when its task does not complete."""
        started = time.monotonic()
        model, name = exported.model, exported.name
        task = self._create_task(exported)
        points: list[Point] = []
        on_progress(name, 0, "first round")

        def follow() -> None:
            for record in self.coordinator.committed(task)[len(points) :]:
                params = self.store.checkpoint(task, record.number)["params"]
                trained = {"round": record.number, SECONDS: record.seconds or 0.0} | record.metrics
                points.append(trained | measured(evaluate(model, params, self.test), self.test))
                on_progress(name, record.number, f"accuracy {points[-1][ACCURACY]:.3f}")

        def on_session(session: Session) -> None:
            if session.outcome.round > len(points):
                follow()

        settings, folder = self.store.task(task).settings, self.config.devices_folder
        how = {"concurrency": self.config.devices, "kinds": counted_kinds(f"{self.config.runtime}:{len(self.train)}")}
        fleet = local_fleet(self.coordinator, settings, self.train, self.key, folder, **how)
        summary = fleet.run(on_session, self.servers)
        follow()
        seconds = time.monotonic() - started
        if len(points) < self.config.rounds:
            raise DemoFailed(
                f"{name}: {len(points)} of {self.config.rounds} rounds; the task is {self.store.task(task).state}"
            )
        sizes = dict(zip(self.train.clients, self.train.sizes.tolist(), strict=True))
        for point in points:
            cohort = counted_cohort(self.store, task, int(point["round"]), summary.clients)
            point["examples"] = sum(sizes[client] for client in cohort.values())
        return Run(exported, task, points, summary, seconds)

    def result(self, run: Run) -> AlgorithmResult:
        """A run with its measurements, and the engine's replay of it."""
        replayed = time.monotonic()
        exported, fleet = run.exported, run.fleet
        engine = Engine(exported.model, exported.algorithm, self.train, seed=self.config.seed)
        numbers = range(1, min(REPLAYED_ROUNDS, self.config.rounds) + 1)
        agreement = difference_from_engine(self.coordinator, run.task, fleet, engine, self.train, numbers)
        reported = fleet.endings["reported"]
        if self.config.out is not None:
            self._keep(run, self.config.out)
        return AlgorithmResult(
            algorithm=exported.name,
            rounds=len(run.points),
            test_accuracy=run.points[-1][ACCURACY],
            report=report_bytes(exported.bundle.plan.report, self.store.task(run.task).settings),
            bytes_up_per_device=fleet.bytes_up / len(fleet.participants),
            bytes_down_per_device=fleet.bytes_down / len(fleet.participants),
            seconds=run.seconds,
            export_seconds=exported.seconds,
            replay_seconds=time.monotonic() - replayed,
            agreement=agreement,
            sessions=reported,
            phases={phase: spent / reported for phase, spent in fleet.phases.items()},
            points=run.points,
        )

    def _keep(self, run: Run, out: Path) -> None:
        """Keep a run, with its plan, in a folder like a simulation's."""
        exported, settings = run.exported, settings_of(run.exported.algorithm)
        folder = (out / exported.algorithm.name).resolve()
        config = SimulationConfig(
            model=MODEL,
            dataset=DATASET,
            algorithm=exported.name,
            settings=settings,
            rounds=self.config.rounds,
            cohort=self.config.devices,
            evaluate_every=1,
            seed=self.config.seed,
            plan=folder / "plan",
        )
        state = self.store.checkpoint(run.task)
        parameters = exported.model.schema.size
        facts = Facts(exported.algorithm.name, settings, config.cohort, len(self.train), parameters, None, TRAINED_BY)
        result = result_of(config, run.points, "rounds", facts, self.test, digest_of([state["params"]]))
        tensors = exported.model.schema.unflatten(state["params"])
        keep_run(folder, config, run.points, {**prefixed(SERVER, state)}, tensors, result)
        shutil.copytree(exported.bundle.folder, config.plan or folder)

    def give_to_app(self, run: Run, evaluation: Bundle) -> AppResult:
        """The model of a run, evaluated, released and used. Raises DemoFailed."""
        trained = self.store.task(run.task).settings
        settings = self._settings(trained.population, len(self.test), 1, self.test, on_held_out=True)
        choose_keys(self.config.devices_folder / settings.population, settings, self.test)
        trip = AppTrip(self.coordinator, self.key, self.servers, self.test, self.config.devices_folder)
        return trip.run(run.exported.name, Source(run.task, len(run.points)), evaluation, settings)

    def _create_task(self, exported: Exported) -> str:
        config = self.config
        settings = self._settings(f"digits-{exported.algorithm.name}", config.devices, config.rounds, self.train)
        settings = for_algorithm(settings, exported.algorithm, self.train)
        choose_keys(config.devices_folder / settings.population, settings, self.train, config.runtime)
        return self.coordinator.create_task(exported.bundle, settings, self.key).id

    def _settings(
        self, population: str, goal: int, rounds: int, users: Population, *, on_held_out: bool = False
    ) -> TaskSettings:
        config = self.config
        settings = demo_settings(population, goal, rounds, config.seed, users, secure=config.secure)
        return replace(settings, hold_out_devices=HELD_OUT_SHARE, on_held_out=on_held_out)
