"""A fleet whose devices are killed in the middle of secure aggregations: the coordinator learns only exact sums.

Devices are processes of the real device runtime, the coordinator is a process of its own, and a device dies by SIGKILL
before or after one of its messages. A recorder beside each device writes what it quantised and what it sent
(simulator/fleet/faults.py). The coordinator is compared with the recordings:

* Every committed round's model is recomputed from the plain sum of the counted quantised reports, bit for bit.
* In an attempt that was abandoned, no share was revealed; in one that was not, one kind of share of each device's.
* No upload, and no quantised report, is in any file of the coordinator. Masked bytes are distributed evenly.

The peer is the same training without masks: the engine, given the very reports that each round counted. A second task
loses four fifths of its devices, so that its attempts fail.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.fleet_training import Training, fleet_training, secure_settings
from benchmarks.options import SecaggFleetOptions
from coordinator.rules.aggregation import aggregate
from coordinator.rules.entities import AssignmentRecord, RoundRecord
from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.store.tasks import CoordinatorStore, Secagg, TaskSettings
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import trips_of
from fedcore.masking import join_weight
from fedcore.params import Float32
from muster.output import Say
from secagg import packing
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.faults import Recording
from simulator.fleet.profile import Kind
from simulator.population import Population

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
    users, unseen = datasets.users(DATASET, None, options.devices)
    model = Model(load(MODEL), options.seed)
    with fleet_training(model, ALGORITHM, users, secure=True) as frame:
        store = frame.local.store

        def give_up(task: str) -> None:
            """Cancel the second task once some of its attempts have ended."""
            ended = sum(record.state.ended for record in store.rounds(task))
            if ended >= options.lost and store.task(task).state is TaskState.ACTIVE:
                store.cancel(task)

        fields: dict[str, Any] = {"wait_s": 4 * options.phase_s, "recorded": True}
        training = frame.run(_settings(options, "trained", users), say, kinds=MORTAL, **fields)
        lost = frame.run(_settings(options, "lost", users), say, give_up, kinds=DOOMED, **fields)
        account = _Account(store, (training.task, lost.task), Recording(frame.folder / "devices"))
        engine = Engine(model, ALGORITHM, users, seed=options.seed)
        agreement = frame.difference(training, engine)
        models = store.checkpoint(training.task, options.rounds)["params"], engine.state["params"]
        accuracy, plain_accuracy = (frame.accuracy(params, unseen) for params in models)
        outcome = _Outcome(training, agreement, accuracy, plain_accuracy)
        return _outcome(options, account, outcome, frame.folder / "coordinator")


def _settings(options: SecaggFleetOptions, population: str, users: Population) -> TaskSettings:
    secagg = Secagg(max_examples=int(users.sizes.max()), phase_s=options.phase_s)
    return secure_settings(options, secagg, population=population, rounds=options.rounds)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The completed task. agreement, plain_accuracy: of the same training without masks."""

    training: Training
    agreement: float
    accuracy: float
    plain_accuracy: float


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
                for row in records.rounds(task):
                    if row.state.ended:
                        yield task, row, records.cohorts.drawn(task, row.number, row.attempt)

    def states(self, task: str) -> Counter[str]:
        return Counter(row.state.value for name, row, _ in self.attempts() if name == task)

    def counted(self) -> Iterator[tuple[str, int, list[str]]]:
        """Task, number and counted assignments of every committed round."""
        for task, row, cohort in self.attempts():
            if row.state is RoundState.COMMITTED:
                yield task, row.number, [seat.id for seat in cohort if seat.state is AssignmentState.REPORTED]

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
        totals = [packing.decode(report.segments, report.words, 1, report.w_max) for report in reports]
        total = reduce(operator.add, totals)
        plan = self.store.plan(self.store.task(task).plan_sha256)
        before = {"params": self.store.checkpoint(task, number - 1)["params"]}
        values = join_weight(plan.report, total.weight, total.sums)
        return aggregate(plan.report, trips_of(ALGORITHM)[0], before, values).state["params"]

    def shares_of_failed(self) -> int:
        """Messages with shares that left a device in an attempt that was abandoned."""
        abandoned = (cohort for _, row, cohort in self.attempts() if row.state is RoundState.ABANDONED)
        failed = {seat.id for cohort in abandoned for seat in cohort}
        return sum(assignment in failed for assignment, _, _ in self.recordings.shares())

    def both_kinds(self) -> int:
        """Devices of which, in one session, shares of the self seed and of the mask key were revealed."""
        kinds: dict[tuple[bytes, int], set[int]] = defaultdict(set)
        for _, session, shares in self.recordings.shares():
            for owner, (kind, _) in shares.items():
                kinds[session, owner].add(kind)
        return sum(len(revealed) > 1 for revealed in kinds.values())

    def uneven(self) -> tuple[int, float]:
        """Uploads, and how far the distribution of their bytes is from an even one, in standard deviations."""
        uploads = self.recordings.uploads()
        counts = sum(np.bincount(words.view(np.uint8), minlength=256) for words in uploads.values())
        expected = np.sum(counts) / 256
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        return len(uploads), (chi_squared - 255) / math.sqrt(2 * 255)

    def found_in(self, home: Path) -> tuple[int, int]:
        """Numbers of uploads and quantised reports: those looked for in the coordinator's files, and those found."""
        samples = []
        for assignment, upload in self.recordings.uploads().items():
            for words in (upload, self.recordings.quantised(assignment).words):
                middle = words.size // 2
                samples.append(words[middle : middle + SAMPLE].tobytes())
        files = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
        return len(samples), sum(any(sample in file for file in files) for sample in samples)


def _outcome(options: SecaggFleetOptions, account: _Account, outcome: _Outcome, home: Path) -> SecaggFleetOutcome:
    trained, lost = (account.states(task) for task in account.tasks)
    rounds = list(account.counted())
    exact, (uploads, uneven), (samples, in_files) = account.exact(), account.uneven(), account.found_in(home)
    gap = 100 * abs(outcome.accuracy - outcome.plain_accuracy)
    training = outcome.training
    shares, both = account.shares_of_failed(), account.both_kinds()
    exact_and_secret = len(rounds) == exact and trained["committed"] == options.rounds and not shares and not both
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
        accuracy=outcome.accuracy,
        plain_accuracy=outcome.plain_accuracy,
        gap_points=gap,
        agreement=outcome.agreement,
        failed=dict(lost),
        shares_of_failed=shares,
        both_kinds=both,
        uploads=uploads,
        uneven=uneven,
        sought=samples,
        found_in_files=in_files,
        endings=dict(training.summary.endings.most_common()),
        sound=exact_and_secret and gap <= MOST_GAP and abs(uneven) < MOST_UNEVEN and not in_files,
    )
