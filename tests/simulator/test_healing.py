"""A fleet that vanishes in mid-round: real processes, real HTTP, and the next fleet finds work at once."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from coordinator.rules.states import AssignmentState, RoundState
from coordinator.store.tasks import Secagg
from fedcore.signing import SigningKey

DEVICES = 10
PATIENCE_S = 90.0
SECAGG = Secagg(max_examples=100)
"""Far longer than a round takes to heal, and far shorter than the deadlines that it must not wait for."""
# Training of some seconds that costs no computing time.
SLOW = '[[kind]]\nname = "slow"\nslow_down = {}\n'


@contextmanager
def fleet(url, folder, signers, slow_down=1.0):
    """A fleet of processes in a process group of their own; whatever is left of it dies at the end."""
    profile = folder / "profile.toml"
    profile.write_text(SLOW.format(slow_down))
    command = [sys.executable, "-m", "muster", "fleet", "run", "--coordinator", url, "--population", "p"]
    command += ["--devices", str(DEVICES), "--concurrency", str(DEVICES), "--profile", str(profile), "--json", *signers]
    with (folder / "fleet.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def until(happened, what):
    """Wait for it."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() < began + PATIENCE_S, f"{what} did not happen in {PATIENCE_S:g} s"
        time.sleep(0.05)


def vanish_and_heal(task, folder, sign, secagg):
    """Interrupt a fleet whose devices train, and start another: the attempts until the commit, and all assignments."""
    settings = {"goal": 8, "rounds": 1, "over_selection": DEVICES / 8, "secagg": secagg}
    signers = [] if secagg is None else ["--signer", SigningKey.load(folder / "release.pem").signer]
    with task(**settings, selection_timeout_s=60.0, reporting_deadline_s=3600.0) as (store, url, task_id):

        def trains():
            rounds = store.rounds(task_id)
            return bool(rounds) and rounds[-1].state is RoundState.REPORTING

        with fleet(url, folder, signers, slow_down=1e5) as first:
            until(trains, "training")
            time.sleep(2)  # into the middle of it: devices hold their assignments by now
            os.killpg(first.pid, sign)
            # A killed fleet is gone. One that was interrupted ends in its own time, while the next one begins.
            with fleet(url, folder, signers):
                until(lambda: store.rounds(task_id)[-1].state is RoundState.COMMITTED, "the commit")
        attempts = store.rounds(task_id)
        with store.database.reading() as records:
            states = [seat.state for one in attempts for seat in records.cohorts.drawn(task_id, 1, one.attempt)]
    return attempts, states


@pytest.mark.promise("Devices that vanish during a round do not hold it up")
@pytest.mark.parametrize(
    ("sign", "secagg"),
    [
        pytest.param(signal.SIGINT, None, id="interrupted-plain", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, SECAGG, id="killed-secure", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, SECAGG, id="interrupted-secure", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, None, id="killed-plain", marks=pytest.mark.long),
    ],
)
def test_next_fleet_commits_after_a_whole_fleet_vanished_in_mid_round(task, tmp_path, sign, secagg):
    attempts, states = vanish_and_heal(task, tmp_path, sign, secagg)
    assert attempts[-1].state is RoundState.COMMITTED
    assert attempts[-1].reported >= 8
    assert {one.reason for one in attempts[:-1]} <= {"devices-lost", "too-few-reports"}
    assert AssignmentState.EXPIRED not in states
    assert states.count(AssignmentState.LOST) + states.count(AssignmentState.ABORTED) >= 3
