"""A fleet of failing devices against a real coordinator: every round must be committed, and all accounts agree.

The peer is the engine: given the reports that each round counted, it must reach the model that the coordinator has. A
report that was counted twice, or not at all, would show.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from coordinator.rules.rounds import RoundState
from coordinator.store.tasks import CoordinatorStore, TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from muster.bench.machine import describe_machine
from muster.server import local_coordinator
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.profile import Kind, load_profile
from simulator.fleet.summary import FleetSummary, Session
from simulator.population import Population
from simulator.proofs.reconcile import Reconciliation, reconcile
from simulator.proofs.replay import counted_cohort, worst_difference

# Smooth, so that the replay does not stray, and small: what is measured here is not training.
MODEL, ALGORITHM, SETTINGS = "logreg", "fedavg", {"batch_size": 5, "epochs": 2, "client_lr": 0.05}
POPULATION = "hostile"
# Of float32 round-off, in the relative distance of two models; what the keystone test allows.
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileConfig:
    """What to run: `devices` of a profile, all awake, for so many rounds. A round wants a quarter of them to report."""

    profile: Path
    devices: int = 40
    rounds: int = 20
    dataset: str = "digits"
    data: Path | None = None
    seed: int = 0

    def settings(self) -> TaskSettings:
        """The task. Twice the goal is selected, because so many fail."""
        goal = max(1, self.devices // 4)
        return TaskSettings(
            population=POPULATION,
            goal=goal,
            minimum=max(1, goal // 2),
            rounds=self.rounds,
            over_selection=2.0,
            selection_timeout_s=10.0,
            reporting_deadline_s=10.0,
            seed=self.seed,
        )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the benchmark, and where it was made.

    committed and abandoned are attempts at rounds. agreement: the relative distance from the engine's model, the worst
    of all rounds. sound: whether every round was committed, all accounts agree, and the model is the engine's.
    """

    benchmark: str
    date: str
    machine: str
    dataset: str
    devices: int
    committed: int
    abandoned: int
    seconds: float
    agreement: float
    sound: bool
    endings: dict[str, int]
    kinds: dict[str, dict[str, int]]
    reconcile: Reconciliation


def run(config: HostileConfig, on_session: Callable[[Session], None]) -> Result:
    """Run the fleet to the end of its task, and compare all accounts. Raises SimulatorError as a fleet does."""
    kinds = load_profile(config.profile)
    users, _ = datasets.users(config.dataset, config.data, config.devices)
    dataset = datasets.describe(config.dataset)
    model = Model(load(MODEL, dataset.shape, dataset.classes), config.seed)
    engine = Engine(model, create(ALGORITHM, SETTINGS), users, seed=config.seed)
    with tempfile.TemporaryDirectory(prefix="muster-hostile-") as place:
        folder = Path(place)
        bundle = export_bundle(model, create(ALGORITHM, SETTINGS), folder / "plan")
        with local_coordinator(folder) as local:
            task = local.store.register_task(bundle, config.settings()).id
            started = time.monotonic()
            summary = _fleet(config, kinds, users, local.url, folder / "devices").run(on_session)
            seconds = time.monotonic() - started
            agreement = _agreement(engine, users, local.store, task, summary)
            found = reconcile(local.store, task, folder / "devices", summary)
            states = [one.state for one in local.store.rounds(task)]
    committed = states.count(RoundState.COMMITTED)
    return Result(
        benchmark="hostile_fleet",
        date=datetime.now(UTC).date().isoformat(),
        machine=describe_machine(),
        dataset=config.dataset,
        devices=config.devices,
        committed=committed,
        abandoned=states.count(RoundState.ABANDONED),
        seconds=seconds,
        agreement=agreement,
        sound=committed == config.rounds and not found.discrepancies and agreement < TOLERANCE,
        endings=dict(summary.endings.most_common()),
        kinds={kind: dict(counts.most_common()) for kind, counts in summary.by.items()},
        reconcile=found,
    )


def _fleet(config: HostileConfig, kinds: tuple[Kind, ...], users: Population, url: str, folder: Path) -> Fleet:
    return Fleet(
        FleetConfig(
            coordinator=url,
            population=POPULATION,
            folder=folder,
            concurrency=config.devices,
            seed=config.seed,
            kinds=kinds,
        ),
        users,
    )


def _agreement(engine: Engine, users: Population, store: CoordinatorStore, task: str, summary: FleetSummary) -> float:
    numbers = [one.number for one in store.rounds(task) if one.state is RoundState.COMMITTED]
    cohorts = [counted_cohort(store, task, number, summary.clients) for number in numbers]
    return worst_difference(engine, users, cohorts, [store.checkpoint(task, n)["params"] for n in numbers])
