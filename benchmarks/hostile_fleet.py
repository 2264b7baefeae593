"""A fleet of failing devices against a real coordinator: every round must be committed, and all accounts agree.

The peer is the engine: given the reports that each round counted, it must reach the model that the coordinator has. A
report that was counted twice, or not at all, would show.
"""

from __future__ import annotations

import msgspec

from benchmarks.fleet_training import fleet_training
from benchmarks.options import HostileFleetOptions
from benchmarks.reconcile import Reconciliation, reconcile
from coordinator.rules.states import RoundState
from coordinator.store.tasks import TaskSettings
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from muster.output import Say
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.profile import load_profile

# Smooth, so that the replay stays close, and small, since training is not measured here.
MODEL, ALGORITHM = "logreg", create("fedavg", {"batch_size": 5, "epochs": 2, "client_lr": 0.05})
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
    with fleet_training(model, ALGORITHM, users) as frame:
        training = frame.run(_settings(options), say, kinds=kinds)
        agreement = frame.difference(training, Engine(model, ALGORITHM, users, seed=options.seed))
        accounts = reconcile(frame.local.store, training.task, frame.folder / "devices" / POPULATION, training.summary)
        states = [record.state for record in frame.local.store.rounds(training.task)]
    committed = states.count(RoundState.COMMITTED)
    return HostileFleetOutcome(
        dataset=options.dataset,
        devices=options.devices,
        committed=committed,
        abandoned=states.count(RoundState.ABANDONED),
        seconds=training.seconds,
        agreement=agreement,
        sound=committed == options.rounds and not accounts.discrepancies and agreement < TOLERANCE,
        endings=dict(training.summary.endings.most_common()),
        kinds={kind: dict(counts.most_common()) for kind, counts in training.summary.by_kind.items()},
        reconcile=accounts,
    )


def _settings(options: HostileFleetOptions) -> TaskSettings:
    """The task. Twice the goal is selected, since many devices fail."""
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
