"""A fleet of failing devices against a real coordinator: every round must be committed, and all accounts agree.

The peer is the engine: given the reports that each round counted, it must reach the model that the coordinator has. A
report that was counted twice, or not at all, would show.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.options import HostileFleetOptions
from benchmarks.reconcile import Reconciliation, reconcile
from coordinator.rules.states import RoundState
from coordinator.store.tasks import CoordinatorStore, TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from muster.local.server import local_coordinator
from muster.output import Say
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.profile import Kind, load_profile
from simulator.fleet.summary import FleetSummary
from simulator.population import Population
from simulator.proofs.fleet_against_engine import counted_cohort, worst_difference

# Smooth, so that the replay does not stray, and small: training is not measured here.
MODEL, ALGORITHM, SETTINGS = "logreg", "fedavg", {"batch_size": 5, "epochs": 2, "client_lr": 0.05}
POPULATION = "hostile"
# The bound of float32 round-off in the relative distance of two models, as in the keystone test.
TOLERANCE = 1e-5


class HostileFleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome: attempts at rounds, endings of sessions, and the comparison of all accounts.

    committed and abandoned are attempts at rounds. agreement: the relative distance from the engine's model, the worst
    of all rounds. sound: whether every round was committed, all accounts agree, and the model is the engine's.
    """

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


def run(options: HostileFleetOptions, say: Say) -> HostileFleetOutcome:
    """Run the fleet to the end of its task, and compare all accounts. Raises SimulatorError as a fleet does."""
    kinds = load_profile(options.profile)
    users, _ = datasets.users(options.dataset, options.data, options.devices)
    model = Model(load(MODEL, users.shape, users.classes), options.seed)
    engine = Engine(model, create(ALGORITHM, SETTINGS), users, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="muster-hostile-") as place:
        folder = Path(place)
        bundle = export_bundle(model, create(ALGORITHM, SETTINGS), folder / "plan")
        with local_coordinator(folder) as local:
            task = local.store.register_task(bundle, _settings(options)).id
            started = time.monotonic()
            fleet = _fleet(options, kinds, users, local.url, folder / "devices")
            summary = fleet.run(lambda session: say(f"{session.client}: {session.ending}", 1))
            seconds = time.monotonic() - started
            agreement = _agreement(engine, users, local.store, task, summary)
            found = reconcile(local.store, task, folder / "devices", summary)
            states = [one.state for one in local.store.rounds(task)]
    committed = states.count(RoundState.COMMITTED)
    return HostileFleetOutcome(
        dataset=options.dataset,
        devices=options.devices,
        committed=committed,
        abandoned=states.count(RoundState.ABANDONED),
        seconds=seconds,
        agreement=agreement,
        sound=committed == options.rounds and not found.discrepancies and agreement < TOLERANCE,
        endings=dict(summary.endings.most_common()),
        kinds={kind: dict(counts.most_common()) for kind, counts in summary.by_kind.items()},
        reconcile=found,
    )


def _settings(options: HostileFleetOptions) -> TaskSettings:
    """The task. Twice the goal is selected, because so many fail."""
    goal = max(1, options.devices // 4)
    return TaskSettings(
        population=POPULATION,
        goal=goal,
        minimum=max(1, goal // 2),
        rounds=options.rounds,
        over_selection=2.0,
        selection_timeout_s=10.0,
        reporting_deadline_s=10.0,
        seed=options.seed,
    )


def _fleet(options: HostileFleetOptions, kinds: tuple[Kind, ...], users: Population, url: str, folder: Path) -> Fleet:
    return Fleet(
        FleetConfig(
            coordinator=url,
            population=POPULATION,
            folder=folder,
            concurrency=options.devices,
            seed=options.seed,
            kinds=kinds,
        ),
        users,
    )


def _agreement(engine: Engine, users: Population, store: CoordinatorStore, task: str, summary: FleetSummary) -> float:
    numbers = [one.number for one in store.rounds(task) if one.state is RoundState.COMMITTED]
    cohorts = [counted_cohort(store, task, number, summary.clients) for number in numbers]
    return worst_difference(engine, users, cohorts, [store.checkpoint(task, n)["params"] for n in numbers])
