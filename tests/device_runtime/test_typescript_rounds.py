"""The device runtime in TypeScript in real rounds: a real coordinator, and Python devices beside it in a secure sum."""

import json
import subprocess

import numpy as np
import pytest

from coordinator.rules.aggregation import aggregate
from coordinator.store.tasks import TaskSettings
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.config import DeviceConfig
from device_runtime.runner import execute
from device_runtime.session import run_session
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.batching import StreamKey
from fedcore.signing import SigningKey
from simulator import datasets
from tests.coordinator.fork_server import wait_until
from tests.device_runtime.node import command, device_words
from tests.questions.hand_made import asked

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


def test_a_question_is_answered_by_devices_of_both_kinds(tmp_path, coordinators):
    question = asked(minimum_devices=2)
    bundle = export_bundle(Model(question.spec()), question.algorithm(), tmp_path / "plan")
    examples = {
        "steps": np.array([2**30 + 1, 5, 7]), "speed": np.array([1, 3, 9], np.float32),
        "y": np.array([0, 0, 2], np.uint8),
    }  # fmt: skip
    with coordinators.local(tmp_path) as local:
        settings = TaskSettings(population="p", goal=2, rounds=1, over_selection=1.0)
        task = local.create_task(bundle, settings, SigningKey.new(tmp_path / "release.pem")).id
        node = start(device_words(tmp_path / "node", local.url, "p", examples))
        np.savez(tmp_path / "examples.npz", **examples)
        ours = {"coordinator": local.url, "population": "p", "examples": tmp_path / "examples.npz"}
        ours |= {"state": tmp_path / "python"}
        python = run_session(DeviceConfig(**ours))
        assert (python.outcome, outcome_of(node)["outcome"]) == ("reported", "reported")
        wait_until(lambda: local.store.answer(task).over)
        found = local.store.answer(task)
    assert found.rows == ((0, 2, 4, 2 * (2**30 + 6), 2.0), (2, 2, 2, 14, 4.0))
    assert found.devices == 2
