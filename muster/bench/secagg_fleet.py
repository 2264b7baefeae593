"""A fleet whose devices are killed in the middle of secure aggregations: sums stay exact, and nothing else is learnt.

Devices are processes of the real device runtime, the coordinator is a process of its own, and a device dies by SIGKILL
before or after one of its messages. Beside each device a witness writes down what it quantised and what it sent
(simulator/witness.py). Against that the coordinator is held:

* Every committed round's model is recomputed from the plain sum of what the counted devices quantised, bit for bit.
* In an attempt that was abandoned, no share was revealed; in one that was not, one kind of share of each device's.
* No upload, and no quantised report, is in any file of the coordinator. Masked bytes are distributed evenly.

The peer is the same training without masks: the engine, given the very reports that each round counted. A second task
loses four fifths of its devices, so that its attempts fail.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from coordinator.aggregation import aggregate
from coordinator.rounds import AssignmentState, RoundState
from coordinator.store.rows import AssignmentRecord, RoundRecord
from coordinator.tasks import CoordinatorStore, Secagg, TaskSettings, open_coordinator_store
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.masking import reunite
from muster.bench.machine import describe_machine
from muster.server import coordinator_process
from secagg import packing
from simulator import datasets
from simulator.agreement import Cohort, counted_cohort, worst_difference
from simulator.engine import Engine, evaluate
from simulator.fleet import Fleet, FleetConfig
from simulator.kinds import Kind
from simulator.population import Population
from simulator.simulation import overall
from simulator.summary import FleetSummary, Session
from simulator.witness import Testimony

MODEL, DATASET = "digits_cnn", "digits"
ALGORITHM = create("fedavg", {"client_lr": 0.1, "epochs": 2, "batch_size": 4})
# Of five devices one is mortal, and of its sessions every fifth ends: a fifth of the fleet in five rounds.
MORTAL = (Kind(name="safe", weight=4), Kind(name="mortal", weight=1, drop_out_secagg=0.2))
DOOMED = (Kind(name="safe", weight=1), Kind(name="doomed", weight=4, drop_out_secagg=1.0))
# How far accuracy may be from that without masks, in points.
MOST_GAP = 0.5
# In standard deviations: how unevenly the bytes of all uploads may be distributed.
MOST_UNEVEN = 5.0
SAMPLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureFleetConfig:
    """What to run: every round selects all `devices`; `sessions` ends the task that fails."""

    devices: int = 100
    rounds: int = 20
    seed: int = 0

    def settings(self, population: str, largest: int) -> TaskSettings:
        """A task of the population, whose devices hold at most `largest` examples."""
        return TaskSettings(
            population=population,
            goal=self.devices,
            minimum=max(8, self.devices * 7 // 10),
            rounds=self.rounds,
            over_selection=1.0,
            selection_timeout_s=60.0,
            reporting_deadline_s=120.0,
            seed=self.seed,
            secagg=Secagg(max_examples=largest, phase_s=20.0),
        )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the benchmark, and where it was made.

    deaths: devices that were killed, by the message at which. exact: committed rounds whose model is that of the plain
    sum, bit for bit. gap_points: how far `accuracy` on held-out users is from `plain_accuracy`, that of the same reports
    without masks. agreement: the relative distance of the two models, the worst of all rounds. failed: what the task
    came to that loses four devices of five. shares_of_failed: messages with shares in abandoned attempts of either.
    both_kinds: devices of which shares of both secrets were revealed in one session. uneven: the distribution of all
    bytes uploaded, in standard deviations from an even one. found_in_files: uploads and quantised reports, of those
    sought, that a file of the coordinator holds. sound: whether all of this is as it should be.
    """

    benchmark: str
    date: str
    machine: str
    devices: int
    values: int
    committed: int
    abandoned: int
    seconds: float
    killed: int
    deaths: dict[str, int]
    counted_least: int
    exact: int
    accuracy: float
    plain_accuracy: float
    gap_points: float
    agreement: float
    failed: dict[str, int]
    shares_of_failed: int
    both_kinds: int
    uploads: int
    uneven: float
    sought: int
    found_in_files: int
    endings: dict[str, int]
    sound: bool


def run(config: SecureFleetConfig, on_session: Callable[[Session], None]) -> Result:
    """Train to the end, lose a second task, and hold the coordinator against the witnesses.

    Raises SimulatorError as a fleet does.
    """
    users, held_out = datasets.users(DATASET, None, config.devices)
    model = Model(load(MODEL), config.seed)
    with tempfile.TemporaryDirectory(prefix="muster-secagg-") as place:
        folder = Path(place)
        home = folder / "coordinator"
        home.mkdir()
        database, blobs = f"sqlite:///{home / 'muster.db'}", home / "blobs"
        bundle = export_bundle(model, ALGORITHM, folder / "plan")
        with open_coordinator_store(database, blobs) as store, coordinator_process(home, database, blobs) as url:
            largest = int(users.sizes.max())
            stage = _Stage(config, users, store, url, folder / "devices")
            trained = store.register_task(bundle, config.settings("trained", largest)).id
            started = time.monotonic()
            summary = stage.fleet("trained", MORTAL, None).run(on_session)
            seconds = time.monotonic() - started
            lost = store.register_task(bundle, config.settings("lost", largest)).id
            stage.fleet("lost", DOOMED, 3 * config.devices).run(on_session)
            account = _Account(store, (trained, lost), Testimony(folder / "devices"))
            plain = _Plain.of(Engine(model, ALGORITHM, users, seed=config.seed), users, store, trained, summary)
            accuracies = [
                overall(evaluate(model, params, held_out)["accuracy"], held_out)
                for params in (store.checkpoint(trained, config.rounds)["params"], plain.engine.state["params"])
            ]
            return _result(config, account, summary, plain, accuracies, seconds, home)


@dataclass(frozen=True, slots=True)
class _Stage:
    config: SecureFleetConfig
    users: Population
    store: CoordinatorStore
    url: str
    folder: Path

    def fleet(self, population: str, kinds: tuple[Kind, ...], sessions: int | None) -> Fleet:
        return Fleet(
            FleetConfig(
                coordinator=self.url,
                population=population,
                folder=self.folder / population,
                concurrency=self.config.devices,
                sessions=sessions,
                wait_s=90.0,
                seed=self.config.seed,
                kinds=kinds,
                witnessed=True,
            ),
            self.users,
        )
