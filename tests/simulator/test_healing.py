"""A fleet that vanishes in mid-round: real processes, real HTTP, and the next fleet finds work at once."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from coordinator.rules.rounds import AssignmentState, RoundState
from coordinator.store.tasks import Secagg, TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from muster.server import local_coordinator

DEVICES = 10
PATIENCE_S = 90.0
"""Far longer than a round takes to heal, and far shorter than the deadlines that it must not wait for."""
# Training of some seconds that costs no computing time.
SLOW = '[[kind]]\nname = "slow"\nslow_down = {}\n'


@contextmanager
def task(folder, **settings):
    """A coordinator process with one task of ten devices whose deadline nobody waits for."""
    bundle = export_bundle(Model(load("logreg")), create("fedavg", {"batch_size": 5}), folder / "plan")
    given = {"population": "p", "goal": 8, "rounds": 1, "over_selection": 1.25, "reporting_deadline_s": 3600.0}
    with local_coordinator(folder) as local:
        yield local.store, local.url, local.store.register_task(bundle, TaskSettings(**given | settings)).id


@contextmanager
def fleet(url, folder, slow_down=1.0):
    """A fleet of processes in a process group of their own; whatever is left of it dies at the end."""
    profile = folder / "profile.toml"
    profile.write_text(SLOW.format(slow_down))
    command = [sys.executable, "-m", "muster", "fleet", "run", "--coordinator", url, "--population", "p"]
    command += ["--devices", str(DEVICES), "--concurrency", str(DEVICES), "--profile", str(profile), "--json"]
    with (folder / "fleet.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def until(happened, what):
    """Wait for it; how many seconds that took."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() < began + PATIENCE_S, f"{what} did not happen in {PATIENCE_S:g} s"
        time.sleep(0.05)
    return time.monotonic() - began


def vanish_and_heal(folder, sign, **settings):
    """Interrupt a fleet whose devices train, start another: seconds to the commit, and the attempts that there were."""
    with task(folder, **settings) as (store, url, task_id):

        def trains():
            rounds = store.rounds(task_id)
            return bool(rounds) and rounds[-1].state is RoundState.REPORTING

        with fleet(url, folder, slow_down=1e5) as first:
            until(trains, "training")
            time.sleep(2)  # into the middle of it: devices hold their assignments by now
            os.killpg(first.pid, sign)
            # A killed fleet is gone. One that was interrupted ends in its own time, while the next one begins.
            with fleet(url, folder):
                seconds = until(lambda: store.rounds(task_id)[-1].state is RoundState.COMMITTED, "the commit")
        attempts = store.rounds(task_id)
        with store.database.reading() as records:
            states = [seat.state for one in attempts for seat in records.cohort(task_id, 1, one.attempt)]
    return seconds, attempts, states


@pytest.mark.parametrize("secagg", [None, Secagg(max_examples=100)], ids=["plain", "secure"])
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_next_fleet_commits_after_a_whole_fleet_vanished_in_mid_round(tmp_path, sign, secagg):
    _, attempts, states = vanish_and_heal(tmp_path, sign, secagg=secagg)
    assert attempts[-1].state is RoundState.COMMITTED
    assert attempts[-1].reported >= 8
    assert {one.reason for one in attempts[:-1]} <= {"devices-lost", "too-few-reports"}
    assert AssignmentState.EXPIRED not in states
    assert states.count(AssignmentState.LOST) + states.count(AssignmentState.ABORTED) >= 3
