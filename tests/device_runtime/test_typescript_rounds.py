"""The device runtime in TypeScript in real rounds: a real coordinator, and Python devices beside it in a secure sum."""

import json
import subprocess

import numpy as np
import pytest

from coordinator.rules.aggregation import aggregate
from coordinator.store.tasks import TaskSettings
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.runner import execute
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.batching import StreamKey
from fedcore.masking import reunite
from fedcore.signing import SigningKey
from secagg import packing
from simulator import datasets
from simulator.fleet.recorder import Recording
from tests.coordinator.fork_server import wait_until
from tests.device_runtime.node import command, device_words
from tests.simulator.test_secure_rounds import DEVICES, World

ALGORITHM = create("fedavg", {"batch_size": 8})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return export_bundle(Model(load("logreg", (1, 8, 8), 10), 3), ALGORITHM, tmp_path_factory.mktemp("plan") / "plan")


def start(words):
    return subprocess.Popen(command("src/node/main.ts", *words), stdout=subprocess.PIPE, text=True)


def outcome_of(process):
    return json.loads(process.communicate(timeout=120)[0])


def values_in(store, task, number, slot, examples):
    """The plan, and the unweighted values and weight that Python's runner gives for a slot of a round."""
    record = store.task(task)
    plan = store.plan(record.plan_sha256)
    graphs = {name: OnnxRuntime().load(store.blobs.get(ref.sha256), name) for name, ref in plan.graphs["onnx"].items()}
    before = {"params": store.checkpoint(task, number - 1)["params"]}
    key = StreamKey(record.settings.seed, number, slot)
    result = execute(plan, graphs, before, examples, key)
    return plan, before, result


def test_a_round_in_clear_commits_the_bits_that_python_would_report(tmp_path, coordinators, bundle):
    users, _ = datasets.users("digits", None, 1)
    with coordinators.local(tmp_path) as local:
        settings = TaskSettings(population="p", goal=1, rounds=1, over_selection=1.0, seed=2**53 + 3)
        task = local.create_task(bundle, settings, SigningKey.new(tmp_path / "release.pem")).id
        words = device_words(tmp_path / "device", local.url, "p", users.shard(0))
        outcome = outcome_of(start(words))
        wait_until(lambda: [one.state for one in local.store.rounds(task)] == ["committed"])
        (row,) = local.store.cohort(task, 1)
        plan, before, result = values_in(local.store, task, 1, row.slot, users.shard(0))
        report = plan.report.weigh(result.values, result.weight).astype(np.float64)
        after = local.store.checkpoint(task, 1)["params"]
    assert (outcome["outcome"], outcome["task"], outcome["steps"]) == ("reported", task, result.steps)
    np.testing.assert_array_equal(after, aggregate(plan.report, ALGORITHM, before, report).state["params"])


def test_a_secure_round_sums_a_node_device_among_python_devices(tmp_path, coordinators, bundle):
    with coordinators.local(tmp_path, secure=True) as local:
        here = World(tmp_path, local, bundle, rounds=1, phase_s=20.0)
        with np.load(here.folders[0] / "examples.npz") as file:
            examples = dict(file)
        words = device_words(tmp_path / "node", local.url, "p", examples, signers=[here.key.signer])
        node = start(words)
        others = [here.start(index) for index in range(1, DEVICES)]
        outcome = outcome_of(node)
        for process in others:
            process.join()
        assert [one.state for one in here.ended(1)] == ["committed"]
        rows = local.store.cohort(here.task, 1)
        recorded = Recording(tmp_path)
        reports = {name: recorded.quantised(name) for name in recorded.uploads()}
        (row,) = [row for row in rows if row.id not in reports]
        plan, before, result = values_in(local.store, here.task, 1, row.slot, examples)
        after = local.store.checkpoint(here.task, 1)["params"]
    assert (outcome["outcome"], outcome["secure"]) == ("reported", True)
    assert len(here.counted(1)) == DEVICES
    words = sum((one.words for one in reports.values()), np.uint64(0))
    segments, w_max = next(iter((one.segments, one.w_max) for one in reports.values()))
    total = packing.decode(segments, words, len(reports), w_max)
    weight = min(int(result.weight), w_max)
    own = plan.report.weigh(result.values, weight)
    summed = reunite(plan.report, total.weight, total.sums) + own
    expected = aggregate(plan.report, ALGORITHM, before, summed).state["params"]
    np.testing.assert_allclose(after, expected, atol=1e-4)
    assert np.abs(after - before["params"]).max() > 1e-2
