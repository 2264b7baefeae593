"""A full disk, a database that is silent or gone, a replica that stands still: nothing is lost, nothing is doubled."""

import contextlib
import signal
import subprocess
import time

import httpx2
import numpy as np
import pytest

from coordinator.rules import progress
from coordinator.rules.progress import Reason
from coordinator.rules.states import RoundState, TaskState
from coordinator.rules.task_settings import TaskSettings
from coordinator.store.tasks import open_coordinator_store
from tests.coordinator.bundles import make_bundle
from tests.coordinator.link import link_to
from tests.coordinator.replicas import LEASE_S, Phones, replicas_on, undisturbed, until
from tests.sampled import sampled

pytestmark = pytest.mark.promise("A full disk, a lost database and a frozen replica lose nothing and double nothing")

GOAL, ROUNDS = 4, 6
POPULATION = {"population": "phones", "goal": GOAL, "rounds": ROUNDS, "over_selection": 1.0}
OUTAGES_S = pytest.mark.parametrize("outage_s", sampled((3.0, 60.0), (3.0,)))


def completed(store, task):
    return store.task(task).state is TaskState.COMPLETED


def committed(store, task):
    return sum(one.state is RoundState.COMMITTED for one in store.rounds(task))


def expect_undisturbed(store, task):
    """The model is, to the bit, the one that counts every slot of every round once."""
    np.testing.assert_array_equal(store.checkpoint(task)["params"], undisturbed(ROUNDS, GOAL))
    assert committed(store, task) == ROUNDS


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@OUTAGES_S
def test_full_disk_stops_rounds_and_loses_nothing(coordinators, small_disk, tmp_path, monkeypatch, outage_s):
    monkeypatch.setattr(progress, "DRIVER_SILENT_S", 2.0)  # the page says it after 30 s
    database = f"sqlite:///{small_disk}/state.db"
    with open_coordinator_store(database, small_disk / "blobs") as store:
        task = store.register_task(make_bundle(tmp_path / "bundle"), TaskSettings(**POPULATION)).id
        with replicas_on(coordinators, small_disk, store, database) as replicas:
            replicas.start()
            with Phones(GOAL, lambda: [replica.url for replica in replicas.alive]) as phones:
                until(lambda: committed(store, task) >= 2)
                fill(small_disk / "filler")
                until(lambda: store.progress()[0].reason is Reason.DRIVER_SILENT)
                until(lambda: "cannot be written" in readiness(replicas))
                before = committed(store, task)
                assert before < ROUNDS
                time.sleep(outage_s)
                assert committed(store, task) == before
                (small_disk / "filler").unlink()
                until(lambda: completed(store, task), 200)
            until(lambda: "ready" in readiness(replicas))
            assert phones.problems == []
        expect_undisturbed(store, task)


def readiness(replicas):
    """What a replica says of itself."""
    return httpx2.get(f"{replicas.alive[0].url}/readyz", timeout=10).text


def fill(path):
    """Write until there is no room."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


@pytest.fixture
def link(postgresql):
    with link_to(postgresql.folder) as made:
        yield made


@pytest.fixture
def replicas(coordinators, store, database, link, tmp_path):
    with replicas_on(coordinators, tmp_path, store, link.url(database)) as started:
        yield started


@OUTAGES_S
@pytest.mark.parametrize("fault", ["silent", "broken", "slow", "swallowing"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_database_out_of_reach_loses_nothing(store, register, replicas, link, fault, outage_s):
    task = register(goal=GOAL, rounds=ROUNDS)
    for _ in range(2):
        replicas.start()
    with Phones(GOAL, lambda: [replica.url for replica in replicas.alive]) as phones:
        until(lambda: committed(store, task) >= 2)
        with getattr(link, fault)():
            before = committed(store, task)
            time.sleep(outage_s)
            assert fault == "slow" or committed(store, task) - before <= 1  # its transaction was on the way
        until(lambda: completed(store, task), 200)
    assert phones.problems == []
    expect_undisturbed(store, task)


@OUTAGES_S
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_three_replicas_go_on_while_one_stands_still(store, register, replicas, outage_s):
    task = register(goal=GOAL, rounds=ROUNDS)
    for _ in range(3):
        replicas.start()
    paused = until(replicas.holder)
    urls = [replica.url for replica in replicas.alive if replica is not paused]
    with Phones(GOAL, lambda: urls) as phones:
        until(lambda: committed(store, task) >= 2, 200)
        paused.signal(signal.SIGSTOP)
        until(lambda: replicas.holder() not in (None, paused), 10 * LEASE_S)
        until(lambda: committed(store, task) >= 4, 200)
        time.sleep(outage_s)
        paused.signal(signal.SIGCONT)
        until(lambda: completed(store, task), 200)
    assert phones.problems == []
    expect_undisturbed(store, task)
