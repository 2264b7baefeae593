"""Bad plans, blobs, folders, clocks and coordinators, each met by a real device process: what it says, and after."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from device_runtime.conditions import Clock, Moment
from device_runtime.device import run_forever
from device_runtime.session import run_session
from device_runtime.state.database import open_database
from device_runtime.state.records import Retry
from fedcore.params import ParamSchema, TensorSpec
from fedcore.signing import SigningKey
from fedcore.wire.messages import Abort, encode
from tests.device_runtime import linear
from tests.device_runtime.coordinator import answer, hang_up, refusal
from tests.device_runtime.process import until
from tests.forked import DEVICE, forked

pytestmark = pytest.mark.promise("Devices in Python, Node and browsers keep the protocol with any coordinator")

KILLS = 6


def command(config, *options):
    words = [sys.executable, "-m", "muster", "device", "run", "--json", "--coordinator", config.coordinator]
    words += ["--population", config.population, "--examples", str(config.examples), "--state", str(config.state)]
    return [*words, *map(str, options)]


def once(config, *options, code=1, **how):
    """The outcome of one session in a process of its own, which ends with `code` and no traceback."""
    done = forked(DEVICE).run(command(config, "--once", *options), **how)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def offer(coordinator, change):
    """Offer the linear plan with some of its JSON changed."""
    raw = json.loads(linear.plan().encode())
    change(raw)
    coordinator.offer(json.dumps(raw).encode(), linear.graphs(), {"params": linear.PARAMS})


def other_format(raw):
    raw["graphs"] = {"coreml": raw["graphs"]["onnx"]}


def other_schema(raw):
    raw["schema"] = msgspec.to_builtins(ParamSchema((TensorSpec("w", (2, 2)),)))


def newer(raw):
    raw["version"] += 1


def other_dtype(raw):
    raw["examples"]["fields"][0]["dtype"] = "complex64"


def no_graph(raw):
    del raw["graphs"]["onnx"]["train.step"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_format, "graphs in ['coreml'], this device runs 'onnx'"),
        (other_schema, "schema has 4 parameters, its broadcast 3"),
        (newer, "version"),
        (other_dtype, "complex64"),
        (no_graph, "train.step"),
    ],
)
def test_a_plan_that_this_device_does_not_know_is_refused_in_words(coordinator, config, change, words):
    offer(coordinator, change)
    outcome = once(config)
    assert (outcome["outcome"], outcome["reason"], outcome["retryable"]) == ("aborted", "plan-refused", "permanent")
    assert words in outcome["detail"]
    assert [abort.reason for abort in coordinator.aborts] == ["plan-refused"]
    usable_afterwards(coordinator, config)


@pytest.mark.security("A plan that was altered … is refused, also when its digests were made to fit")
def test_tampered_plan_is_refused_although_its_digest_fits(coordinator, config, tmp_path):
    key = SigningKey.new(tmp_path / "key.pem")
    signature = key.sign(coordinator.plan)
    (tmp_path / "policy.toml").write_text(f'signers = ["{key.signer}"]')
    offer(coordinator, lambda raw: raw["passes"][0]["loop"].update(epochs=9))
    signed = msgspec.structs.replace(coordinator.assignment(), plan_signature=signature)
    coordinator.faults["assignment"] = [answer(encode(signed))]
    outcome = once(config, "--policy", tmp_path / "policy.toml")
    assert (outcome["outcome"], outcome["reason"]) == ("aborted", "plan-refused")
    assert "against signers" in outcome["detail"]
    assert "blob" not in coordinator.calls


def test_other_bytes_than_the_digests_are_a_bad_answer(coordinator, config):
    for digest in (coordinator.plan.sha256, coordinator.checkpoint.sha256):
        whole = coordinator.blobs[digest]
        coordinator.blobs[digest] = b"\0" + whole[1:]
        outcome = once(config)
        assert (outcome["outcome"], outcome["reason"], outcome["retryable"]) == ("failed", "bad-answer", "transient")
        coordinator.blobs[digest] = whole
    assert coordinator.reports == []
    usable_afterwards(coordinator, config)


def test_no_examples_are_too_few_and_other_ones_are_named(coordinator, config, examples):
    np.savez(config.examples, **linear.examples(0))
    assert once(config)["reason"] == "too-few-examples"
    np.savez(config.examples, x=examples["x"].astype(np.float64), y=examples["y"])
    outcome = once(config)
    assert (outcome["reason"], "'x' holds float64" in outcome["detail"]) == ("invalid-examples", True)
    config.examples.unlink()
    assert once(config)["reason"] == "invalid-examples"
    np.savez(config.examples, **examples)
    usable_afterwards(coordinator, config)


def test_labels_that_are_none_are_named_before_anything_is_sent(coordinator, config):
    for given, words in (
        ((), "label 'region' is not like region=eu"),
        (("region=eu", "region=us"), "label region is given twice"),
        ((f"region={'x' * 65}",), "label region: its value must have 1 to 64 bytes, not 65"),
        (tuple(f"n{number}=v" for number in range(17)), "17 labels are too many: a device has at most 16"),
    ):
        labels = [word for one in given or ("region",) for word in ("--label", one)]
        done = forked(DEVICE).run([*command(config, "--once"), *labels])
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr.splitlines()[-1]
    assert coordinator.calls == []


def test_an_unknown_backend_names_those_that_there_are(coordinator, config):
    for options in (["--once"], []):
        words = [*command(config, *options), "--backend", "coreml"]
        done = forked(DEVICE).run(words)
        assert (done.returncode, done.stdout) == (1, "")
        assert "'executorch', 'onnxruntime'" in done.stderr
        assert "Traceback" not in done.stderr
    assert coordinator.calls == []


def test_a_mistake_that_was_mended_costs_no_wait_after_a_restart(coordinator, config, examples):
    config.examples.rename(config.examples.with_suffix(".away"))
    with forked(DEVICE).start(command(config), stdout=subprocess.PIPE, text=True) as device:
        assert json.loads(device.stdout.readline())["reason"] == "invalid-examples"
        time.sleep(0.2)  # until it sleeps
        device.terminate()
    np.savez(config.examples, **examples)
    with forked(DEVICE).start(command(config), stdout=subprocess.PIPE, text=True) as device:
        assert json.loads(device.stdout.readline())["outcome"] == "reported"
        device.terminate()


def test_a_coordinator_that_is_down_or_fails_is_to_be_tried_again(coordinator, config):
    coordinator.faults["check-in"] = [hang_up] * 4 + [refusal("internal")]
    for reason in ("unreachable", "internal"):
        outcome = once(config)
        assert (outcome["outcome"], outcome["reason"], outcome["retryable"]) == ("failed", reason, "transient")
    usable_afterwards(coordinator, config)


def usable_afterwards(coordinator, config):
    """The same state folder serves a good assignment."""
    coordinator.offer(linear.plan(), linear.graphs(), {"params": linear.PARAMS})
    assert run_session(config).outcome == "reported"
    assert len(coordinator.reports) == 1


def test_a_folder_that_even_an_administrator_cannot_write_is_said(coordinator, config):
    outcome = once(config, "--state", "/sys/muster")
    assert (outcome["outcome"], outcome["reason"]) == ("failed", "state-unusable")
    assert "/sys/muster" in outcome["detail"]
    assert coordinator.calls == []


def test_a_state_folder_that_became_read_only_is_said_and_loses_nothing(coordinator, config):
    if os.geteuid():
        pytest.skip("made for an administrator: only one can run a device as somebody else")
    assert run_session(config).outcome == "reported"
    before = {path.name: path.read_bytes() for path in config.state.iterdir() if path.is_file()}
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        state = Path(place) / "state"
        shutil.copytree(config.state, state)
        for path in (state, *state.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        shutil.copy(config.examples, Path(place) / "examples.npz")
        outcome = as_nobody(config.coordinator, config.population, Path(place) / "examples.npz", state)
        assert (outcome["outcome"], outcome["reason"]) == ("failed", "state-unusable")
        assert {path.name: path.read_bytes() for path in state.iterdir() if path.is_file()} == before
    assert coordinator.calls.count("check-in") == 1


AS_NOBODY = """
import os, sys, msgspec
from device_runtime import Device
from device_runtime.conditions import Clock
Clock()  # with it Python loads an encoding, which nobody may read later
device = Device(*sys.argv[1:])
os.seteuid(65534)
print(msgspec.json.encode(device.run_once()).decode())
"""


def as_nobody(*arguments):
    """The outcome of a device in a process that gave up an administrator's rights after loading what it needs."""
    words = [sys.executable, "-c", AS_NOBODY, *map(str, arguments)]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)


def test_a_disk_that_fills_while_the_device_works_is_said_to_both_sides(coordinator, config):
    """A limit on a file's size stands for the disk: a file of its own size would need a file system to mount."""
    assert run_session(config).outcome == "reported"
    big = {"params": linear.PARAMS, "padding": np.zeros(1 << 17, np.float32)}
    coordinator.offer(linear.plan(), linear.graphs(), big)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))

    outcome = once(config, preexec_fn=limit)
    assert (outcome["outcome"], outcome["reason"]) == ("failed", "state-unusable")
    assert "File too large" in outcome["detail"]
    assert coordinator.aborts == [Abort("runtime-failed")]
    coordinator.offer(linear.plan(), linear.graphs(), {"params": linear.PARAMS})
    assert run_session(config).outcome == "reported"


@pytest.mark.parametrize(
    ("set_s", "reboot", "comes"),
    [(-1e8, False, False), (1e8, False, False), (-1e8, True, False), (1e8, True, True)],
    ids=["back", "forward", "back over a reboot", "forward over a reboot"],
)
def test_clock_set_between_two_processes_does_not_change_the_wait(coordinator, config, set_s, reboot, comes):
    """The clock cannot be set for one process, so what an earlier process wrote by it is set the other way."""
    now = Clock(boot="another boot" if reboot else Clock().boot, wall=lambda: time.time() - set_s)
    config.state.mkdir()
    with open_database(config.state, now) as database:
        Retry(database, config.coordinator, config.population).stay_away_until(Moment.after(50.0, now))

    class Waits(Exception):
        """The device waits before its next session."""

    def wait(seconds):
        raise Waits(seconds)

    outcomes = []
    with pytest.raises(Waits) as waits:
        run_forever(config, outcomes.append, sleep=wait)
    assert [outcome.outcome for outcome in outcomes] == (["reported"] if comes else [])
    if not comes:
        assert 0 < waits.value.args[0] <= 50


def test_kills_at_any_moment_leave_usable_state_and_single_reports(world):
    tasks = []
    for number in range(KILLS):
        world.create()  # one for each, as a task whose attempts fail in a row slows down and pauses
        tasks.append(world.task)
        device = world.start("--once")
        time.sleep(0.3 + 0.25 * number)
        device.kill()
        device.communicate()
    until(lambda: world.once()["reason"] == "no-task", within_s=150)
    sent = {}
    for path, body in world.road.reports:
        sent.setdefault(path, set()).add(body)
    assert all(len(bodies) == 1 for bodies in sent.values())
    assert [sum(one["reported"] for one in world.rounds(task)) for task in tasks] == [1] * KILLS
    assert not list(world.state.glob("*.damaged-*"))
