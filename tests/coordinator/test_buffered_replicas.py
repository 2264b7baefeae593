"""Mode buffered with several processes on one database: reports come to any of them, and any of them may die."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from coordinator.failpoints import VARIABLE
from coordinator.rules.buffers import staleness_weight
from coordinator.rules.states import RoundState, TaskState
from coordinator.rules.task_settings import Buffered
from tests.coordinator.bundles import START, make_bundle, make_plan, report_body
from tests.coordinator.devices import speaking_to
from tests.coordinator.replicas import Phones, driver_and_other, replicas_on, until
from tests.coordinator.test_api import assign, put, refused

pytestmark = pytest.mark.promise("In buffered mode a killed replica loses no receipt, and devices at work continue")

GOAL, ROUNDS, DEVICES = 3, 4, 5
PATIENCE_S = 120


@pytest.fixture
def replicas(coordinators, store, database, tmp_path):
    with replicas_on(coordinators, tmp_path, store, database) as started:
        yield started


@pytest.fixture
def buffered(register, tmp_path):
    """Register a task in mode buffered on FedBuff; answers its id."""
    bundle = make_bundle(tmp_path / "fedbuff", make_plan(weighting="uniform"), "fedbuff")

    def make(max_staleness=20, **settings):
        mode = Buffered(concurrency=DEVICES, max_staleness=max_staleness)
        return register(bundle, **{"goal": GOAL, "rounds": ROUNDS, "buffered": mode} | settings)

    return make


def delta_of(number, slot):
    """What a device reports: another for every slot of every round."""
    return np.array([1, number, slot + 1, number * (slot + 1)], np.float64)


class Workers(Phones):
    """Devices that keep their receipts."""

    def __init__(self, count, urls):
        super().__init__(count, urls, self._note)
        self.receipts = set()

    def _note(self, event, assignment):
        if event == "reported":
            self.receipts.add(assignment.assignment)

    def _train(self, _, assignment):
        return report_body(delta_of(assignment.round, assignment.slot), 1)


@contextlib.contextmanager
def workers(store, task, replicas):
    """Devices that ask whichever replica is alive, until the task is completed; then every version is that of its rows.

    Each report is in one version at most, and each receipt has a row.
    """
    with Workers(DEVICES, lambda: [replica.url for replica in replicas.alive]) as devices:
        yield
        until(lambda: store.task(task).state is TaskState.COMPLETED, PATIENCE_S)
    assert devices.problems == []
    model, counted = START.astype(np.float64), []
    for number in range(1, ROUNDS + 1):
        in_sum = store.counted(task, number)
        weighed = [staleness_weight(number - one.number) * delta_of(one.number, one.slot) for one in in_sum]
        model = (model + sum(weighed) / len(in_sum)).astype(np.float32).astype(np.float64)
        np.testing.assert_allclose(store.checkpoint(task, number)["params"], model, rtol=1e-6)
        assert len({one.device for one in in_sum}) == len(in_sum) >= GOAL
        counted += [one.id for one in in_sum]
    assert len(set(counted)) == len(counted)
    done = [one for one in store.rounds(task) if one.state is RoundState.COMMITTED]
    assert sum(one.reported for one in done) == sum(sum(one.staleness) for one in done) == len(counted)
    with store.database.reading() as records:
        receipts = {one: records.assignment(one).report_sha256 for one in devices.receipts}
    assert None not in receipts.values()


def reasons(store, task):
    return {one.reason for one in store.rounds(task)}


@pytest.mark.every_engine
def test_reports_at_three_replicas_make_the_model_that_rows_say(store, buffered, replicas):
    task = buffered()
    replicas.start()
    until(replicas.holder)
    for _ in range(2):
        replicas.start(role="api")
    with workers(store, task, replicas):
        pass
    assert reasons(store, task) == {""}


@pytest.mark.parametrize(
    ("database", "failpoint"),
    [
        pytest.param(engine, f"{name}:{n}", marks=() if (engine, n) in short else pytest.mark.long)
        for name, short in (
            ("receipt.before-commit", {("sqlite", 1)}),
            ("receipt.after-commit", {("postgresql", 2)}),
            ("sum.before-hand-over", {("sqlite", 2), ("postgresql", 1)}),
        )
        for engine in ("sqlite", "postgresql")
        for n in (1, 2)
    ],
    indirect=["database"],
)
def test_replica_that_dies_with_receipts_costs_a_buffer_at_most(store, buffered, replicas, failpoint):
    task = buffered()
    replicas.start()
    until(replicas.holder)
    dying = replicas.start(environment={VARIABLE: failpoint}, role="api")
    replicas.start(role="api")
    with workers(store, task, replicas):
        dying.ended()
        replicas.alive.remove(dying)
    assert reasons(store, task) <= {"", "replica-lost"}


@pytest.mark.every_engine
def test_killed_driver_is_replaced_and_every_version_stays(store, buffered, replicas):
    task = buffered()
    for _ in range(3):
        replicas.start()
    with workers(store, task, replicas):
        until(lambda: any(one.state is RoundState.COMMITTED for one in store.rounds(task)), PATIENCE_S)
        replicas.kill(until(replicas.holder))
    assert reasons(store, task) <= {"", "driver-lost", "replica-lost"}


def present(client, given):
    """A thread that asks after a report as long as a test runs, so that its device is there."""
    over = threading.Event()

    def ask():
        while not over.wait(0.5):
            client.head(f"/v1/assignments/{given.assignment}/report", auth=client.devices.owner(given.assignment))

    thread = threading.Thread(target=ask)
    thread.start()
    return over, thread


@pytest.mark.every_engine
def test_killed_replica_costs_its_buffer_and_no_device_at_work(store, buffered, replicas):
    task = buffered(goal=2, rounds=1)
    with driver_and_other(replicas) as (here, there, other):
        (slow,), (quick,) = assign(here, "slow"), assign(here, "quick")
        body = report_body([100, 0, 0, 0], 1)
        receipt = put(there, quick.assignment, body)
        until(lambda: store.rounds(task)[0].reported)
        replicas.kill(other)
        with speaking_to(here.base_url, devices=here.devices) as asking:
            over, thread = present(asking, slow)
            until(lambda: store.rounds(task)[0].reason == "replica-lost", PATIENCE_S)
            over.set()
            thread.join()
        assert put(here, quick.assignment, body).content == receipt.content
        assert put(here, slow.assignment, report_body([0, 2, 0, 0], 1)).status_code == 200
        (again,) = assign(here, "quick")
        assert (again.round, again.attempt) == (1, 2)
        assert put(here, again.assignment, report_body([0, 4, 0, 0], 1)).status_code == 200
        until(lambda: store.task(task).state is TaskState.COMPLETED)
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0, 3, 0, 0], np.float32))


@pytest.mark.every_engine
def test_report_sent_to_two_replicas_counts_once(store, buffered, replicas):
    task = buffered(goal=2, rounds=1)
    with driver_and_other(replicas) as (here, there, _):
        (first,), (second,) = assign(here, "a"), assign(here, "b")
        body = report_body([0, 2, 0, 0], 1)
        receipt = put(there, first.assignment, body)
        assert receipt.status_code == 200
        assert put(here, first.assignment, body).content == put(there, first.assignment, body).content
        assert put(here, first.assignment, body).content == receipt.content
        refused(put(here, first.assignment, report_body([9, 9, 9, 9], 1)), "conflicting-report")
        assert put(here, second.assignment, report_body([0, 0, 4, 0], 1)).status_code == 200
        until(lambda: store.task(task).state is TaskState.COMPLETED)
    assert [one.reported for one in store.rounds(task)] == [2]
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0, 1, 2, 0], np.float32))


@pytest.mark.every_engine
def test_old_report_is_weighed_or_refused_at_a_replica_too(store, buffered, replicas):
    task = buffered(goal=1, rounds=9, max_staleness=1)
    with driver_and_other(replicas) as (here, there, _):
        (oldest,), (old,) = assign(here, "oldest"), assign(here, "old")
        body = report_body([4, 0, 0, 0], 1)
        (first,) = assign(here, "a")
        assert put(there, first.assignment, body).status_code == 200
        until(lambda: store.rounds(task)[0].state is RoundState.COMMITTED)
        assert put(there, old.assignment, body).status_code == 200
        until(lambda: store.rounds(task)[1].state is RoundState.COMMITTED)
        refused(put(there, oldest.assignment, body), "too-stale")
    moved = store.checkpoint(task, 2)["params"] - store.checkpoint(task, 1)["params"]
    np.testing.assert_allclose(moved, [4 * 2**-0.5, 0, 0, 0], rtol=1e-6)
    assert store.rounds(task)[1].staleness == (0, 1)
