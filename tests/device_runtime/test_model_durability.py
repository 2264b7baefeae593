"""A process that is killed while it takes a version of a model has the old version or the new one, and goes on."""

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from device_runtime.errors import ModelRefused
from device_runtime.models.model import Model
from device_runtime.state.records import read_journal
from tests.device_runtime.opened import X
from tests.device_runtime.process import until
from tests.device_runtime.released import NAME, POLICY, ROWS, released
from tests.forked import DEVICE, forked

REFRESH = """
import os, signal, sys
from device_runtime import Device, Policy
from device_runtime.models.version import Version
from device_runtime.state.records import ModelStore

coordinator, folder, signer, what, at = sys.argv[1:]

def dying(method, place):
    calls = []
    def call(*arguments):
        calls.append(arguments)
        if len(calls) == int(place) and what.startswith("before"):
            os.kill(os.getpid(), signal.SIGKILL)
        given = method(*arguments)
        if len(calls) == int(place):
            os.kill(os.getpid(), signal.SIGKILL)
        return given
    return call

if "step" in what:
    ModelStore.put = dying(ModelStore.put, at)
if "trial" in what:
    Version.try_out = dying(Version.try_out, at)
device = Device(coordinator, "phones", f"{folder}/none.npz", f"{folder}/state", policy=Policy(signers=(signer,)))
with device.model("keyboard") as model:
    print(model.refresh(), model.version)
"""


@pytest.fixture
def owned(coordinator, config):
    """A device that has version 1, while its coordinator has version 2."""
    config = replace(config, policy=POLICY)
    released(coordinator, 1)
    with Model(config, NAME) as model:
        model.refresh()
    released(coordinator, 2)
    return config


@contextmanager
def process(config, what="", at=1):
    arguments = [config.coordinator, config.state.parent, POLICY.signers[0], what, at]
    command = [sys.executable, "-c", REFRESH, *map(str, arguments)]
    with forked(DEVICE).start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        yield running


def ended(config, what="", at=1):
    with process(config, what, at) as running:
        out, err = running.communicate(timeout=60)
    return running.returncode, out.split(), err


def version(config):
    """The version that opens offline, which each of its answers tells."""
    with Model(replace(config, coordinator="http://127.0.0.1:9"), NAME) as model:
        assert model.predict({"x": ROWS})["output"].tolist() == [float(model.version)] * 3
        return model.version


STEPS = [(when, step) for step in range(1, 5) for when in ("before-step", "after-step")]


@pytest.mark.parametrize(("when", "step"), STEPS)
def test_killed_at_a_durable_step_it_has_one_version_and_goes_on(owned, when, step):
    assert ended(owned, when, step)[0] == -signal.SIGKILL
    last = (when, step) == STEPS[-1]
    assert version(owned) == (2 if last else 1)
    code, out, err = ended(owned)
    assert (code, out) == (0, [str(not last), "2"]), err
    assert version(owned) == 2


def test_there_are_as_many_durable_steps_as_are_tested(owned):
    assert ended(owned, "before-step", len(STEPS) // 2 + 1)[:2] == (0, ["True", "2"])


@pytest.mark.parametrize("call", ["model", "blob"])
def test_killed_while_it_asks_or_downloads_it_has_the_old_version(coordinator, owned, call):
    reached = threading.Event()

    def hold(handler):
        reached.set()
        handler.close_connection = True
        until(lambda: running.returncode is not None)

    coordinator.faults[call] = [hold]
    with process(owned) as running:
        assert reached.wait(60)
        running.kill()
        running.communicate()
    assert version(owned) == 1
    assert ended(owned)[:2] == (0, ["True", "2"])


def test_a_trial_that_ends_the_process_twice_is_not_begun_again(owned):
    for _ in range(2):
        assert ended(owned, "before-trial")[0] == -signal.SIGKILL
        assert version(owned) == 1
    with Model(owned, NAME) as model, pytest.raises(ModelRefused, match="ended this process on trial, 2 times"):
        model.refresh()
    assert version(owned) == 1
    assert read_journal(owned.state)[-1].outcome == "model-refused"


def test_trials_of_versions_in_turns_are_counted_each(coordinator, owned):
    """A roll-out that goes back and forth, while every version ends the process, ends it twice for each."""
    second = coordinator.models[NAME]
    third = released(coordinator, 3, counter=2)
    for _ in range(2):
        for release in (second, third):
            coordinator.models[NAME] = release
            assert ended(owned, "before-trial")[0] == -signal.SIGKILL
    for release in (second, third, second):
        coordinator.models[NAME] = release
        with Model(owned, NAME) as model, pytest.raises(ModelRefused, match="ended this process on trial, 2 times"):
            model.refresh()
    assert version(owned) == 1


def test_a_trial_that_was_killed_once_is_made_again(owned):
    assert ended(owned, "before-trial")[0] == -signal.SIGKILL
    assert ended(owned)[:2] == (0, ["True", "2"])


def test_a_device_killed_at_any_write_has_one_version_or_the_other(coordinator, elsewhere):
    released(coordinator, 1)
    with elsewhere() as node:
        assert node.refresh() == (True, 1)
    found = set()
    for step in range(100):
        released(coordinator, step + 2)
        with elsewhere(step) as node:
            ended = node.ask("refresh") is None
        with elsewhere() as again:
            version = again.ask("predict", columns=X)["version"]
            assert version in (step + 1, step + 2)
            assert again.answers() == [version] * 3
            found.add((ended, version - step))
            assert again.refresh() == (version == step + 1, step + 2)
        if not ended:
            break
    assert found == {(True, 1), (True, 2), (False, 2)}
    assert step > 5
