"""A fleet whose devices are killed in the middle of secure aggregations: the coordinator learns only exact sums.

Devices are processes of the real device runtime, the coordinator is a process of its own, and a device dies by SIGKILL
before or after one of its messages. A recorder beside each device writes what it quantised and what it sent
(simulator/fleet/recorder.py). The coordinator is compared with the recordings:

* Every committed round's model is recomputed from the plain sum of the counted quantised reports, bit for bit.
* In an attempt that was abandoned, no share was revealed; in one that was not, one kind of share of each device's.
* No upload, and no quantised report, is in any file of the coordinator. Masked bytes are distributed evenly.

The peer is the same training without masks: the engine, given the very reports that each round counted. A second task
loses four fifths of its devices, so that its attempts fail.
"""

from __future__ import annotations

import math
import operator
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.options import SecaggFleetOptions
from coordinator.rules.aggregation import aggregate
from coordinator.rules.entities import AssignmentRecord, RoundRecord
from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.store.tasks import CoordinatorStore, Secagg, TaskSettings
from device_runtime.permission.policy import Policy
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import trips_of
from fedcore.masking import join_weight
from fedcore.params import Float32
from fedcore.signing import SigningKey
from muster.local.server import LocalCoordinator, local_coordinator
from muster.output import Say
from secagg import packing
from simulator import datasets
from simulator.course import overall
from simulator.engine import Engine, evaluate
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.profile import Kind
from simulator.fleet.recorder import Recording
from simulator.fleet.summary import FleetSummary, Session
from simulator.population import Population
from simulator.proofs.fleet_against_engine import counted_cohort, worst_difference

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


class SecaggFleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome: attempts at rounds, exactness of sums, and what the coordinator could learn.

    deaths: devices that were killed, by the message at which. exact: committed rounds whose model is that of the plain
    sum, bit for bit. gap_points: how far `accuracy` on held-out users is from `plain_accuracy`, that of the same
    reports without masks. agreement: the relative distance of the two models, the worst of all rounds. failed: what
    the task came to that loses four devices of five. shares_of_failed: messages with shares in abandoned attempts of
    either. both_kinds: devices of which shares of both secrets were revealed in one session. uneven: the distribution
    of all bytes uploaded, in standard deviations from an even one. found_in_files: uploads and quantised reports, of
    those sought, that a file of the coordinator holds. sound: whether all of this is as it should be.
    """

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


def run(options: SecaggFleetOptions, say: Say) -> SecaggFleetOutcome:
    """Train to the end, lose a second task, and compare the coordinator with the recordings.

    Raises SimulatorError as a fleet does.
    """

    def on_session(session: Session) -> None:
        say(f"{session.client}: {session.ending}", 1)

    users, held_out = datasets.users(DATASET, None, options.devices)
    model = Model(load(MODEL), options.seed)
    with tempfile.TemporaryDirectory(prefix="muster-secagg-") as place:
        folder = Path(place)
        home = folder / "coordinator"
        home.mkdir()
        bundle = export_bundle(model, ALGORITHM, folder / "plan")
        with local_coordinator(home, secure=True) as local:
            largest = int(users.sizes.max())
            key = SigningKey.new(folder / "release.pem")
            fleet = _SecureFleet(options, users, local, key, folder / "devices")
            trained = local.create_task(bundle, _settings(options, "trained", largest), key).id
            started = time.monotonic()
            summary = fleet.of("trained", MORTAL).run(on_session)
            seconds = time.monotonic() - started
            lost = local.create_task(bundle, _settings(options, "lost", largest), key).id
            fleet.lose(lost, on_session)
            account = _Account(local.store, (trained, lost), Recording(folder / "devices"))
            engine = Engine(model, ALGORITHM, users, seed=options.seed)
            agreement = _replay(engine, users, local.store, trained, summary)
            models = (local.store.checkpoint(trained, options.rounds)["params"], engine.state["params"])
            accuracies = [overall(evaluate(model, one, held_out)["accuracy"], held_out) for one in models]
            return _outcome(options, account, _Training(summary, seconds, agreement, accuracies), home)


def _settings(options: SecaggFleetOptions, population: str, largest: int) -> TaskSettings:
    """A task of the population, whose devices hold at most `largest` examples."""
    return TaskSettings(
        population=population,
        goal=options.devices,
        minimum=max(8, options.devices * 7 // 10),
        rounds=options.rounds,
        over_selection=1.0,
        selection_timeout_s=3 * options.phase_s,
        reporting_deadline_s=10 * options.phase_s,  # five phases follow the training
        seed=options.seed,
        secagg=Secagg(max_examples=largest, phase_s=options.phase_s),
    )


@dataclass(frozen=True, slots=True)
class _Training:
    """The completed task: accuracies on held-out users are those of its model, and of the model without masks."""

    summary: FleetSummary
    seconds: float
    agreement: float
    accuracies: Sequence[float]


@dataclass(frozen=True, slots=True)
class _SecureFleet:
    options: SecaggFleetOptions
    users: Population
    local: LocalCoordinator
    key: SigningKey
    folder: Path

    def lose(self, task: str, on_session: Callable[[Session], None]) -> None:
        """Run a task whose devices die, until some of its attempts have ended."""

        def on_end(session: Session) -> None:
            on_session(session)
            store = self.local.store
            ended = sum(one.state.ended for one in store.rounds(task))
            if ended >= self.options.lost and store.task(task).state is TaskState.ACTIVE:
                store.cancel(task)

        self.of("lost", DOOMED).run(on_end)

    def of(self, population: str, kinds: tuple[Kind, ...]) -> Fleet:
        """A fleet of devices of these kinds, which serve one population."""
        return Fleet(
            FleetConfig(
                coordinator=self.local.url,
                population=population,
                folder=self.folder / population,
                concurrency=self.options.devices,
                wait_s=4 * self.options.phase_s,
                seed=self.options.seed,
                kinds=kinds,
                recorded=True,
                policy=Policy(signers=(self.key.signer,), require_secure_aggregation=True),
            ),
            self.users,
        )


@dataclass(frozen=True, slots=True)
class _Account:
    """The coordinator's rows of its tasks, compared with the recordings."""

    store: CoordinatorStore
    tasks: Sequence[str]
    recordings: Recording

    def attempts(self) -> Iterator[tuple[str, RoundRecord, list[AssignmentRecord]]]:
        """Every attempt that ended, of all tasks."""
        with self.store.database.reading() as records:
            for task in self.tasks:
                for one in records.rounds(task):
                    if one.state.ended:
                        yield task, one, records.cohorts.drawn(task, one.number, one.attempt)

    def states(self, task: str) -> Counter[str]:
        return Counter(one.state.value for name, one, _ in self.attempts() if name == task)

    def counted(self) -> Iterator[tuple[str, int, list[str]]]:
        """Task, number and counted assignments of every committed round."""
        for task, one, cohort in self.attempts():
            if one.state is RoundState.COMMITTED:
                yield task, one.number, [seat.id for seat in cohort if seat.state is AssignmentState.REPORTED]

    def deaths(self, task: str) -> dict[str, int]:
        """How many devices were killed in a task's rounds, by the message at which."""
        seats = {seat.id for name, _, cohort in self.attempts() if name == task for seat in cohort}
        where = (words for name, words in self.recordings.deaths().items() if name in seats)
        return dict(sorted(Counter(chain.from_iterable(where)).items()))

    def exact(self) -> int:
        """Committed rounds whose model is that of the plain sum of the quantised reports."""
        return sum(
            np.array_equal(self.store.checkpoint(task, number)["params"], self._recomputed(task, number, names))
            for task, number, names in self.counted()
        )

    def _recomputed(self, task: str, number: int, names: Sequence[str]) -> Float32:
        reports = [self.recordings.quantised(name) for name in names]
        totals = [packing.decode(one.segments, one.words, 1, one.w_max) for one in reports]
        total = reduce(operator.add, totals)
        plan = self.store.plan(self.store.task(task).plan_sha256)
        before = {"params": self.store.checkpoint(task, number - 1)["params"]}
        made = aggregate(
            plan.report, trips_of(ALGORITHM)[0], before, join_weight(plan.report, total.weight, total.sums)
        )
        return made.state["params"]

    def shares_of_failed(self) -> int:
        """Messages with shares that left a device in an attempt that was abandoned."""
        abandoned = (cohort for _, one, cohort in self.attempts() if one.state is RoundState.ABANDONED)
        failed = {seat.id for cohort in abandoned for seat in cohort}
        return sum(assignment in failed for assignment, _, _ in self.recordings.shares())

    def both_kinds(self) -> int:
        """Devices of which, in one session, shares of the self seed and of the mask key were revealed."""
        kinds: dict[tuple[bytes, int], set[int]] = defaultdict(set)
        for _, session, shares in self.recordings.shares():
            for owner, (kind, _) in shares.items():
                kinds[session, owner].add(kind)
        return sum(len(found) > 1 for found in kinds.values())

    def uneven(self) -> tuple[int, float]:
        """Uploads, and how far the distribution of their bytes is from an even one, in standard deviations."""
        uploads = self.recordings.uploads()
        counts = sum(np.bincount(words.view(np.uint8), minlength=256) for words in uploads.values())
        expected = np.sum(counts) / 256
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        return len(uploads), (chi_squared - 255) / math.sqrt(2 * 255)

    def found_in(self, home: Path) -> tuple[int, int]:
        """Uploads and quantised reports that were sought in the coordinator's files, and those that were found."""
        sought = []
        for assignment, words in self.recordings.uploads().items():
            for one in (words, self.recordings.quantised(assignment).words):
                middle = one.size // 2
                sought.append(one[middle : middle + SAMPLE].tobytes())
        files = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
        return len(sought), sum(any(bytes_ in file for file in files) for bytes_ in sought)


def _replay(engine: Engine, users: Population, store: CoordinatorStore, task: str, summary: FleetSummary) -> float:
    """Train again without masks, from the counted reports; the largest distance from the fleet's models."""
    numbers = range(1, store.task(task).settings.rounds + 1)
    cohorts = [counted_cohort(store, task, number, summary.clients) for number in numbers]
    return worst_difference(engine, users, cohorts, [store.checkpoint(task, n)["params"] for n in numbers])


def _outcome(options: SecaggFleetOptions, account: _Account, training: _Training, home: Path) -> SecaggFleetOutcome:
    trained, lost = (account.states(task) for task in account.tasks)
    rounds = list(account.counted())
    exact, (uploads, uneven), (sought, found) = account.exact(), account.uneven(), account.found_in(home)
    accuracy, plain_accuracy = training.accuracies
    gap = 100 * abs(accuracy - plain_accuracy)
    shares, both = account.shares_of_failed(), account.both_kinds()
    kept = len(rounds) == exact and trained["committed"] == options.rounds and not shares and not both
    return SecaggFleetOutcome(
        devices=options.devices,
        values=account.store.plan(account.store.task(account.tasks[0]).plan_sha256).report.size,
        committed=trained["committed"],
        abandoned=trained["abandoned"],
        seconds=training.seconds,
        killed=training.summary.endings["killed"],
        deaths=account.deaths(account.tasks[0]),
        counted_least=min((len(names) for task, _, names in rounds if task == account.tasks[0]), default=0),
        exact=exact,
        accuracy=accuracy,
        plain_accuracy=plain_accuracy,
        gap_points=gap,
        agreement=training.agreement,
        failed=dict(lost),
        shares_of_failed=shares,
        both_kinds=both,
        uploads=uploads,
        uneven=uneven,
        sought=sought,
        found_in_files=found,
        endings=dict(training.summary.endings.most_common()),
        sound=kept and gap <= MOST_GAP and abs(uneven) < MOST_UNEVEN and not found,
    )
