"""Secure rounds for real: a coordinator over HTTP, devices that are processes, and kills.

Every sum is recomputed from what the devices quantised before they masked it: the committed model must be the same,
bit for bit.
"""

from __future__ import annotations

import base64
import multiprocessing
import signal
import sqlite3
import time
from contextlib import closing

import msgspec
import numpy as np
import pytest

from coordinator.keys import rotate
from coordinator.rules.aggregation import aggregate
from coordinator.rules.states import AssignmentState
from coordinator.store.tasks import Secagg, TaskSettings
from device_runtime.errors import Outcome
from device_runtime.state.records import read_journal
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.masking import join_weight
from fedcore.signing import SigningKey
from secagg import packing
from secagg.messages import SessionResult
from simulator import datasets
from tests.coordinator.devices import speaking_to
from tests.coordinator.fork_server import wait_until
from tests.coordinator.test_secure_api import parties
from tests.sampled import sampled
from tests.simulator.secure_device import be_device, quantised_in, shares_in

pytestmark = pytest.mark.promise("A secure round has the exact sum, whoever dies, or none and no share was revealed")

DEVICES, LEAST = 9, 8
ALGORITHM = create("fedavg", {"batch_size": 8})
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.simulator.secure_device"])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return export_bundle(Model(load("logreg", (1, 8, 8), 10), 3), ALGORITHM, tmp_path_factory.mktemp("plan") / "plan")


class World:
    """Nine devices' folders, a store, and a coordinator that serves it."""

    def __init__(self, folder, local, bundle, rounds, phase_s):
        self.store, self.url, self.folder = local.store, local.url, folder
        self.key = SigningKey.new(folder / "release.pem")
        secagg = Secagg(max_examples=25, phase_s=phase_s)
        settings = {"goal": DEVICES, "minimum": LEAST, "over_selection": 1.0, "rounds": rounds, "secagg": secagg}
        self.task = local.create_task(bundle, TaskSettings(population="p", **settings), self.key).id
        users, _ = datasets.users("digits", None, DEVICES)
        self.folders = [folder / f"device-{index}" for index in range(DEVICES)]
        for index, home in enumerate(self.folders):
            home.mkdir()
            np.savez(home / "examples.npz", **users.shard(index))

    def start(self, index, dies=None):
        process = PROCESSES.Process(target=be_device, args=(self.folders[index], self.url, self.key.signer, dies))
        process.start()
        return process

    def outcome(self, index):
        return msgspec.json.decode((self.folders[index] / "outcome.json").read_bytes(), type=Outcome)

    def all_report(self, number):
        """Round `number`, in which every device reports."""
        for process in [self.start(index) for index in range(DEVICES)]:
            process.join()
            assert process.exitcode == 0
        assert {self.outcome(index).outcome for index in range(DEVICES)} == {"reported"}
        assert [one.state for one in self.ended(number)] == ["committed"] * number

    def enrolments(self):
        """The server's key as every device has pinned it."""
        query = "SELECT enrolled ->> 'server' FROM enrolment"
        for home in self.folders:
            with closing(sqlite3.connect(home / "state" / "state.db")) as database:
                yield from database.execute(query).fetchall()

    def ended(self, attempts):
        """The rounds, once so many attempts have ended."""
        until = time.monotonic() + 30
        while True:
            rounds = self.store.rounds(self.task)
            if len(rounds) >= attempts and rounds[attempts - 1].state.ended:
                return rounds
            assert time.monotonic() < until, rounds
            time.sleep(0.05)

    def counted(self, number):
        """The assignments whose reports round `number` counted."""
        cohort = self.store.cohort(self.task, number)
        return [one.id for one in cohort if one.state is AssignmentState.REPORTED]

    def recomputed(self, number):
        """The parameters after round `number`, from what devices quantised."""
        reports = [quantised_in(self.folder, name) for name in self.counted(number)]
        words = sum((one.words for one in reports), np.uint64(0))
        total = packing.decode(reports[0].segments, words, len(reports), reports[0].w_max)
        plan = self.store.plan(self.store.task(self.task).plan_sha256)
        before = {"params": self.store.checkpoint(self.task, number - 1)["params"]}
        return aggregate(plan.report, ALGORITHM, before, join_weight(plan.report, total.weight, total.sums)).state[
            "params"
        ]


@pytest.fixture
def world(tmp_path, coordinators, bundle):
    with coordinators.local(tmp_path, secure=True) as local:
        yield lambda rounds, phase_s: World(tmp_path, local, bundle, rounds, phase_s)


# Where the first device is killed in each round, what becomes of it when it is started again, and how many are counted.
DEATHS = [
    (("before", 1), "aborted", 8),
    (("after", 3), "aborted", 8),
    (("after", 7), "reported", 9),
    (("before", 9), "reported", 9),
    (("after", 9), "reported", 9),
    (("before", 11), "reported", 9),
    (("after", 11), "reported", 9),
    (("before", 7), "not-needed", 8),  # the last: it held up the round, so the next one would draw it last
]


@pytest.mark.security("honest devices: leave at any time")
def test_a_device_killed_anywhere_leaves_an_exact_sum(world):
    here = world(len(DEATHS), phase_s=4.0)
    for number, (dies, failure, count) in enumerate(DEATHS, start=1):
        others = [here.start(index) for index in range(1, DEVICES)]
        victim = here.start(0, dies)
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        revived = here.start(0)
        for process in (revived, *others):
            process.join()
            assert process.exitcode == 0
        assert [one.state for one in here.ended(number)] == ["committed"] * number
        assert (dies, here.outcome(0).outcome) == (dies, failure)
        assert {here.outcome(index).outcome for index in range(1, DEVICES)} == {"reported"}
        assert len(here.counted(number)) == count
        np.testing.assert_array_equal(here.store.checkpoint(here.task, number)["params"], here.recomputed(number))
    assert_the_same_shares_each_time(here.folder)
    receipts = [entry for entry in read_journal(here.folders[0] / "state") if entry.receipt]
    results = [bytes.fromhex(entry.result) for entry in receipts]
    assert len(results) == sum(failure == "reported" for _, failure, _ in DEATHS)
    assert all(SessionResult.decode(message, message[2:34]).summed for message in results)


def test_devices_enrolled_before_a_rotation_take_part_after_it(tmp_path, coordinators, bundle):
    with coordinators.local(tmp_path, secure=True) as local, speaking_to(local.url) as client:
        here = World(tmp_path, local, bundle, rounds=2, phase_s=20.0)
        here.all_report(1)
        pinned = {key for (key,) in here.enrolments()}
        key = rotate(tmp_path / "muster.db.keys", local.store.database).server.public
        wait_until(lambda: parties(client).server.current == key)
        here.all_report(2)
        assert pinned != {base64.b64encode(key).decode()} == {now for (now,) in here.enrolments()}


def assert_the_same_shares_each_time(folder):
    by_assignment, kinds = {}, {}
    for assignment, session, shares in shares_in(folder):
        assert by_assignment.setdefault(assignment, shares) == shares
        for owner, (kind, _) in shares.items():  # nobody reveals both secrets of a device
            assert kinds.setdefault((session, owner), kind) == kind
    assert by_assignment


@pytest.mark.parametrize("number", sampled([3, 7, 9], [9]))
def test_with_too_few_devices_left_no_share_leaves(world, number):
    here = world(1, phase_s=1.0)
    processes = [here.start(index, ("before", number) if index < 5 else None) for index in range(DEVICES)]
    for process in processes:
        process.join()
    (attempt,) = here.ended(1)
    assert (attempt.state, attempt.reason, attempt.reported) == ("abandoned", "too-few-reports", 0)
    assert {here.outcome(index).outcome for index in range(5, DEVICES)} <= {"not-needed", "aborted"}
    assert not list(shares_in(here.folder))
