"""Several processes on one database: any of them answers a device, and any of them may die or sleep at any moment."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sqlite3
import threading
import time

import httpx2
import numpy as np
import pytest

from coordinator.api.masked_exchange import MASKED, SHARES, proof_of
from coordinator.failpoints import FAILPOINTS, VARIABLE
from coordinator.keys import Keys
from coordinator.rules.replicas import MaskedNews, Shares, encode_news, encode_shares
from coordinator.rules.states import RoundState, TaskState
from coordinator.rules.task_settings import ClearReports
from tests.coordinator.bundles import START, report_body
from tests.coordinator.devices import speaking_to
from tests.coordinator.replicas import Phones, driver_and_other, replicas_on, undisturbed, until
from tests.coordinator.test_api import ask, assign, check_in, check_in_once, put, refused
from tests.coordinator.test_uploads import BODY, head, patch

GOAL = 4
OF_DRIVERS = ("blob", "assignment", "report", "round")
"""What a process that drives rounds reaches, where failpoints have these names."""


@pytest.fixture
def replicas(coordinators, store, database, tmp_path):
    with replicas_on(coordinators, tmp_path, store, database) as started:
        yield started


def completed(store, task):
    return store.task(task).state is TaskState.COMPLETED


def expect_undisturbed(store, task, rounds):
    """The model is, to the bit, the one that counts every slot of every round once."""
    np.testing.assert_array_equal(store.checkpoint(task)["params"], undisturbed(rounds, GOAL))
    done = [one for one in store.rounds(task) if one.state is RoundState.COMMITTED]
    assert [(one.number, one.reported) for one in done] == [(n, GOAL) for n in range(1, rounds + 1)]


def test_devices_spread_over_all_replicas_train_to_the_end(store, register, replicas):
    task, other = register(goal=GOAL, rounds=4), register(population="tablets", goal=1, rounds=1)
    urls = [replicas.start(role=role).url for role in ("all", "all", "api")]
    # The first takes both if it is alone for a moment, and gives one back once it knows of another.
    until(lambda: replicas.holder() and replicas.holder("tablets") not in (None, replicas.holder()))
    with Phones(GOAL, lambda: urls) as phones:
        until(lambda: completed(store, task))
    assert phones.problems == []
    expect_undisturbed(store, task, 4)
    assert len(store.rounds(task)) == 4
    assert store.rounds(other) == []


@pytest.mark.parametrize("database", ["postgresql", pytest.param("sqlite", marks=pytest.mark.long)], indirect=True)
def test_killed_holder_is_replaced_and_nothing_counts_twice(store, register, replicas):
    rounds = 6
    task = register(goal=GOAL, rounds=rounds)
    for _ in range(3):
        replicas.start()
    moments = [("accepted", 2, 1), ("assigned", 3, GOAL), ("reported", 4, 1), ("reported", 5, GOAL)]
    seen: dict[tuple[str, int], int] = {}
    lock = threading.Lock()

    def watch(event, assignment):
        with lock:
            number = assignment.round if assignment else len(store.rounds(task)) + 1
            seen[event, number] = seen.get((event, number), 0) + 1
            if moments and moments[0] == (event, number, seen[event, number]):
                moments.pop(0)
                replicas.kill(until(replicas.holder))
                replicas.start()

    with Phones(GOAL, lambda: [replica.url for replica in replicas.alive], watch) as phones:
        until(lambda: completed(store, task), 60)
    assert phones.problems == []
    assert moments == []
    expect_undisturbed(store, task, rounds)
    assert {one.reason for one in store.rounds(task)} == {"", "driver-lost"}


@pytest.mark.promise("A replica that is killed is replaced by another, with the same model")
@pytest.mark.long
@pytest.mark.every_engine
@pytest.mark.parametrize("failpoint", [name for name in FAILPOINTS if name.partition(".")[0] in OF_DRIVERS])
def test_holder_that_dies_at_any_durable_step_is_replaced_by_another(store, register, replicas, failpoint):
    task = register(goal=GOAL, rounds=3)
    dying = replicas.start(environment={VARIABLE: f"{failpoint}:2"})
    until(lambda: replicas.holder() is dying)
    replicas.start()
    with Phones(GOAL, lambda: [replica.url for replica in replicas.alive]) as phones:
        dying.ended()
        replicas.alive.remove(dying)
        until(lambda: completed(store, task), 60)
    assert phones.problems == []
    expect_undisturbed(store, task, 3)


@pytest.mark.promise("A replica that is killed while it sums reports loses no receipt")
@pytest.mark.parametrize(
    ("database", "failpoint"),
    [
        pytest.param(engine, f"{name}:{n}", marks=() if (engine == "sqlite") is (n == 1) else pytest.mark.long)
        for engine in ("sqlite", "postgresql")
        for name in ("receipt.before-commit", "receipt.after-commit", "sum.before-hand-over")
        for n in (1, 2)
    ],
    indirect=["database"],
)
def test_replica_that_dies_with_receipts_neither_loses_nor_doubles_one(store, register, replicas, failpoint):
    task = register(goal=GOAL, rounds=3)
    replicas.start()
    until(replicas.holder)
    dying = replicas.start(environment={VARIABLE: failpoint}, role="api")
    replicas.start(role="api")
    with Phones(GOAL, lambda: [replica.url for replica in replicas.alive]) as phones:
        dying.ended()
        replicas.alive.remove(dying)
        until(lambda: completed(store, task), 60)
    assert phones.problems == []
    expect_undisturbed(store, task, 3)
    assert {one.reason for one in store.rounds(task)} <= {"", "replica-lost"}


@pytest.mark.promise("A replica that is killed while it sums reports loses no receipt")
@pytest.mark.every_engine
def test_attempt_ends_when_a_replica_with_receipts_is_killed(store, register, replicas):
    task = register(goal=2, rounds=1)
    with driver_and_other(replicas) as (here, there, other):
        first, second = assign(here, "a", "b")
        receipt = put(there, first.assignment, report_body([100, 0, 0, 0], 1))
        until(lambda: store.rounds(task)[0].reported)
        replicas.kill(other)
        assert put(here, second.assignment, report_body([100, 0, 0, 0], 1)).status_code == 200
        until(lambda: store.rounds(task)[0].reason == "replica-lost")
        assert put(here, first.assignment, report_body([100, 0, 0, 0], 1)).content == receipt.content
        for again in assign(here, "a", "b"):
            put(here, again.assignment, report_body([0, 1, 0, 0], 1))
        until(lambda: completed(store, task))
    np.testing.assert_array_equal(store.checkpoint(task)["params"], np.array([1, 3, 3, 4], np.float32))


def test_attempt_goes_on_when_a_replica_without_receipts_is_killed(store, register, replicas):
    task = register(goal=2, rounds=1)
    with driver_and_other(replicas) as (here, there, other):
        first, second = assign(here, "a", "b")
        refused(put(there, first.assignment, b"x"), "invalid-report")
        replicas.kill(other)
        for given in (first, second):
            put(here, given.assignment, report_body([0, 1, 0, 0], 1))
        until(lambda: completed(store, task))
    assert [(one.attempt, one.state.value) for one in store.rounds(task)] == [(1, "committed")]


def test_report_that_is_needed_one_by_one_goes_to_the_driver(store, register, replicas):
    task = register(goal=3, rounds=1, clear=ClearReports(estimator="median"))
    with driver_and_other(replicas) as (here, there, _):
        for given, value in zip(assign(here, "a", "b", "c"), (1, 2, 9), strict=True):
            assert put(there, given.assignment, report_body([0, value, 0, 0], 1)).status_code == 200
        until(lambda: completed(store, task))
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0, 2, 0, 0], np.float32))


def test_report_in_parts_is_counted_where_they_are(store, register, replicas):
    task = register(goal=2, rounds=1)
    with driver_and_other(replicas) as (here, there, _):
        first, second = assign(here, "a", "b")
        assert patch(there, first.assignment, 0, 20, last="?0").status_code == 204
        assert head(there, first.assignment).headers["upload-offset"] == "20"
        assert head(here, first.assignment).headers["upload-offset"] == "0"
        assert patch(there, first.assignment, 20).status_code == 200
        until(lambda: head(here, first.assignment).headers["upload-complete"] == "?1")
        assert put(here, second.assignment, BODY).status_code == 200
        until(lambda: completed(store, task))
    assert store.rounds(task)[0].reported == 2


def test_replica_that_is_told_to_stop_costs_no_attempt(store, register, replicas):
    task = register(goal=2, rounds=1)
    with driver_and_other(replicas) as (here, there, other):
        first, second = assign(here, "a", "b")
        assert put(there, first.assignment, report_body([0, 1, 0, 0], 1)).status_code == 200
        other.signal(signal.SIGTERM)
        other.ended()
        replicas.alive.remove(other)
        put(here, second.assignment, report_body([0, 1, 0, 0], 1))
        until(lambda: completed(store, task))
    assert [(one.attempt, one.state.value) for one in store.rounds(task)] == [(1, "committed")]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_driver_that_stands_still_holds_up_no_sum_of_another(store, register, replicas):
    tasks = register(goal=2, rounds=1), register(goal=2, rounds=1, population="tablets")
    drivers = [replicas.start(lease_s=60) for _ in tasks]
    until(lambda: {replicas.holder(), replicas.holder("tablets")} == {*drivers})
    still, drives = replicas.holder(), replicas.holder("tablets")
    body = report_body([0, 1, 0, 0], 1)
    other = replicas.start(role="api")
    with speaking_to(other.url) as there, speaking_to(drives.url, devices=there.devices) as here:
        first, last = assign(there, "a", "b")
        assert put(there, first.assignment, body).status_code == 200
        until(lambda: store.rounds(tasks[0])[0].reported)
        still.signal(signal.SIGSTOP)
        time.sleep(2)  # every second its driver is told that the replica is there
        one, another = assign(here, "c", "d", population="tablets")
        assert put(there, one.assignment, body).status_code == put(here, another.assignment, body).status_code == 200
        until(lambda: completed(store, tasks[1]), 20)
        still.signal(signal.SIGCONT)
        assert put(there, last.assignment, body).status_code == 200
        until(lambda: completed(store, tasks[0]))
    assert [[one.reason for one in store.rounds(task)] for task in tasks] == [[""], [""]]


def test_report_of_another_device_or_of_a_forged_id_is_taken_nowhere(store, register, replicas):
    task = register(goal=2, rounds=1)
    body = report_body([0, 1, 0, 0], 1)
    with driver_and_other(replicas) as (here, there, _):
        first, second = assign(here, "a", "b")
        owners, forged = there.devices.of, f"{first.assignment[:-1]}-"
        owner, owners[first.assignment] = owners[first.assignment], owners[second.assignment]
        owners[forged] = owner
        refused(put(there, first.assignment, body), "foreign-assignment")
        refused(put(there, forged, body), "unknown-assignment")
        owners[first.assignment] = owner
        assert put(there, first.assignment, body).status_code == 200
        refused(put(there, first.assignment, report_body([9, 9, 9, 9], 1)), "conflicting-report")
        assert put(there, second.assignment, body).status_code == 200
        until(lambda: completed(store, task))
    assert store.rounds(task)[0].reported == 2


@pytest.mark.parametrize("path", [SHARES, MASKED])
def test_shares_are_taken_from_replicas_alone_and_as_they_were_sent(store, register, replicas, tmp_path, path):
    register(goal=2, rounds=1)
    driver = replicas.start()
    until(replicas.holder)
    key, own = Keys.open(tmp_path / "keys", store.database).between_replicas, store.database
    with own.reading() as records:
        (replica,) = records.leases.replicas()
    message = {
        SHARES: encode_shares(Shares(replica="01234567", present=["a"], shares=[]), []),
        MASKED: encode_news(MaskedNews(replica="01234567", claims=[], checking=["a"], shares=[]), []),
    }[path]

    def send(body, digest, key):
        target = f"{path}?sha256={hashlib.sha256(digest).hexdigest()}"
        proof = proof_of(key, "POST", target.encode(), replica.id).decode()
        return httpx2.post(f"{driver.url}{target}", content=body, headers={"Muster-Forwarded": proof})

    assert send(message, message, key).is_success
    refused(send(message + b" ", message, key), "malformed-message")
    refused(send(b"x", b"x", key), "malformed-message")
    refused(send(message, message, bytes(32)), "unavailable")
    refused(httpx2.post(f"{driver.url}{path}", content=message), "unknown-resource")


def same_answer(client, assignment, body, earlier):
    """Whether a report gets its receipt again; not known when a connection broke that was idle for too long."""
    with contextlib.suppress(httpx2.TransportError):
        return put(client, assignment, body).content == earlier.content


def stop_outside_a_transaction(replica, database):
    """Pause a process, but not one that holds SQLite's only write lock: it would hold up everybody."""
    while True:
        replica.signal(signal.SIGSTOP)
        with contextlib.closing(sqlite3.connect(database, timeout=0.1)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError:
                replica.signal(signal.SIGCONT)


@pytest.mark.promise("A process that slept past its lease commits nothing")
def test_holder_that_slept_past_its_lease_commits_nothing(store, register, replicas, tmp_path):
    task = register(goal=2, rounds=1)
    sleeper = replicas.start()
    until(replicas.holder)
    other = replicas.start()
    with speaking_to(sleeper.url) as asleep, speaking_to(other.url, devices=asleep.devices) as awake:
        first, second = assign(asleep, "a", "b")
        body = report_body([100, 0, 0, 0], 1)
        receipt = put(asleep, first.assignment, body)
        assert receipt.status_code == 200
        stop_outside_a_transaction(sleeper, tmp_path / "state.db")
        # The other one counts it, for a sum that nobody will ask for.
        late = put(awake, second.assignment, body)
        assert late.status_code == 200
        until(lambda: replicas.holder() is other)
        again = assign(awake, "a", "b")
        assert [(one.round, one.attempt) for one in again] == [(1, 2), (1, 2)]
        put(awake, again[0].assignment, report_body([0, 1, 0, 0], 1))
        sleeper.signal(signal.SIGCONT)
        # It was told of the second report while it slept, or hears of it now: its sum must reach nobody.
        until(lambda: same_answer(asleep, second.assignment, body, late))
        assert put(awake, first.assignment, body).content == receipt.content
        put(asleep, again[1].assignment, report_body([0, 1, 0, 0], 1))
        until(lambda: completed(store, task))
    np.testing.assert_array_equal(store.checkpoint(task)["params"], np.array([1, 3, 3, 4], np.float32))
    assert [(one.attempt, one.state.value, one.reason) for one in store.rounds(task)] == [
        (1, "abandoned", "driver-lost"),
        (2, "committed", ""),
    ]


def test_unreachable_replica_is_not_waited_for_and_its_sessions_end(store, register, replicas):
    register(goal=1, rounds=2)
    lost = replicas.start(lease_s=60)
    until(lambda: replicas.holder() is lost)
    other = replicas.start(lease_s=3)
    with speaking_to(other.url) as client:
        body = report_body([1, 0, 0, 0], 1)
        (assignment,) = assign(client, "a")
        receipt = put(client, assignment.assignment, body)
        session = check_in(client).json()["session"]
        replicas.kill(lost)
        for answer in (check_in_once(client), ask(client, session)):
            assert refused(answer, "unavailable").retry is not None
            assert answer.headers["retry-after"] == "1"
        until(lambda: replicas.holder() is other)
        until(lambda: ask(client, session).status_code == 404)
        assert put(client, assignment.assignment, body).content == receipt.content
        assert check_in(client).json()["outcome"] == "accepted"


def test_populations_of_a_stopping_replica_move_at_once(store, register, replicas):
    register(goal=1)
    stopping = replicas.start(lease_s=60)
    until(lambda: replicas.holder() is stopping)
    other = replicas.start(lease_s=60)
    with speaking_to(other.url) as client:
        (assignment,) = assign(client, "a")
        stopping.signal(signal.SIGTERM)
        stopping.ended()
        until(lambda: replicas.holder() is other)
        refused(put(client, assignment.assignment, report_body([1, 0, 0, 0], 1)), "no-longer-needed")
        (again,) = assign(client, "a")
        assert (again.round, again.attempt) == (1, 2)


def test_roles_driver_answers_replicas_alone_and_api_drives_nothing(store, register, replicas):
    register(goal=1)
    front, behind = replicas.start(role="api"), replicas.start(role="driver")
    with speaking_to(front.url) as known, speaking_to(behind.url, devices=known.devices) as client:
        refused(check_in_once(client), "unavailable")
        forged = client.get("/v1/blobs/0", headers={"Muster-Forwarded": "0" * 64})
        refused(forged, "unavailable")
        assert client.get("/readyz").status_code == 200
    until(lambda: replicas.holder() is behind)
    with speaking_to(front.url) as client:
        assert client.get("/readyz").status_code == 200
        (assignment,) = until(lambda: check_in(client).status_code == 200 and assign(client, "a"))
        assert put(client, assignment.assignment, report_body([1, 0, 0, 0], 1)).status_code == 200
