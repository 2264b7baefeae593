"""Models of the device runtime in TypeScript: the same versions are taken and refused as by Python's."""

import atexit
import functools
import json
import subprocess
import time

import numpy as np
import pytest
from msgspec import UNSET, structs

from coordinator.store.tasks import TaskSettings
from device_runtime import Device
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore import checkpoint
from fedcore.algorithms import create
from fedcore.model_release import ModelRelease
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, FrozenVectors
from simulator import datasets
from tests.device_runtime import linear
from tests.device_runtime.coordinator import refusal
from tests.device_runtime.linear import FLOAT, graph
from tests.device_runtime.node import command
from tests.device_runtime.released import KEY, NAME, OTHER, POLICY, ROWS, released
from tests.device_runtime.test_models import UNFIT

X = {"x": ("float32", ROWS.ravel().tolist())}


def process(*more):
    """A process of Node that opens devices, one after the other."""
    return subprocess.Popen(command("tests/models.ts", *more), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@functools.cache
def shared():
    """The process that tests take in turn: to start one for each device takes a third of a second of CPU."""
    running = process()
    atexit.register(running.communicate)
    return running


class Node:
    """A device in TypeScript with one open model. more: "web", or the writes of its state before it is killed."""

    def __init__(self, folder, url, *more, **policy):
        self._is_alone = bool(more)
        if not more and shared.cache_info().currsize and shared().poll() is not None:
            shared.cache_clear()
        self.process = process(*more) if more else shared()
        self._where = {"state": str(folder / "node"), "url": url, "policy": {"signers": [KEY.signer], **policy}}

    def __enter__(self):
        self.ask("open", **self._where)
        return self

    def __exit__(self, *_):
        if self._is_alone:
            self.process.kill()
            self.process.communicate()
        else:
            self.ask("leave")

    def ask(self, order, **about):
        """The answer to an order; None when the process ended instead."""
        self.process.stdin.write(json.dumps({"do": order, **about}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else None

    def refresh(self):
        answer = self.ask("refresh")
        return answer.get("swapped", answer.get("error")), answer["version"]

    def answers(self, columns=X):
        return self.ask("predict", columns=columns)["outputs"]["output"]


@pytest.fixture
def folder(tmp_path, examples):
    np.savez(tmp_path / "examples.npz", **examples)
    return tmp_path


@pytest.fixture
def node(coordinator, folder):
    with Node(folder, coordinator.url) as running:
        yield running


def remarks(answer):
    return [entry["detail"] for entry in answer["journal"] if entry["outcome"] == "model-refused"]


def test_a_version_is_fetched_and_predicts_until_the_next_one(coordinator, node):
    before = node.ask("predict", columns=X)
    assert before["error"] == "NoModel"
    assert before["detail"] == "no version of model keyboard is here yet: refresh() fetches one"
    assert node.refresh() == (False, None)
    for number in (1, 2):
        released(coordinator, number)
        assert node.refresh() == (True, number)
        assert node.answers() == [number] * 3
    assert node.refresh() == (False, 2)
    withdrawn = coordinator.models.pop("keyboard")
    assert (node.refresh(), node.answers()) == ((False, 2), [2.0] * 3)
    coordinator.models["keyboard"] = withdrawn
    assert coordinator.calls.count("blob") == 4, "plan and graph are those of the first"
    assert node.ask("close")["version"] is None
    for order in ("predict", "refresh"):
        answer = node.ask(order, columns=X)
        assert (answer["error"], answer["detail"]) == ("ModelClosed", "model keyboard is closed")


def test_a_version_predicts_on_the_engine_of_browsers(coordinator, folder):
    with Node(folder, coordinator.url, "web") as node:
        for number in (1, 2):
            released(coordinator, number)
            assert node.refresh() == (True, number)
            assert node.answers() == [number] * 3


def test_a_model_opens_offline_with_its_last_version(coordinator, folder):
    released(coordinator, 1, expires_at=int(time.time()) + 2)
    with Node(folder, coordinator.url) as first:
        assert first.refresh() == (True, 1)
    calls = len(coordinator.calls)
    time.sleep(2)  # it has expired: that bounds what is taken, not what is here
    with Node(folder, coordinator.url) as second:
        assert second.answers() == [1.0] * 3
    assert len(coordinator.calls) == calls
    with Node(folder, coordinator.url, signers=[OTHER.signer]) as other:
        (warning,) = other.ask("predict", columns=X)["warnings"]
        assert warning.startswith("the kept version of model keyboard cannot be used: against signers")
    for path in (folder / "node" / "blobs").iterdir():
        path.write_bytes(b"damaged")
    released(coordinator, 2)
    with Node(folder, coordinator.url) as damaged:
        assert "is not in the cache any more" in damaged.ask("predict", columns=X)["warnings"][0]
        assert damaged.refresh() == (True, 2)


def test_sessions_leave_the_blobs_of_the_version_and_its_lock(coordinator, folder):
    coordinator.offer(linear.plan(), linear.graphs(), {"params": linear.PARAMS})
    released(coordinator, 1)
    with Node(folder, coordinator.url, cache_bytes=0, signers=[]) as node:
        assert node.refresh() == (True, 1)
        assert node.ask("session")["outcome"]["outcome"] == "reported"
        assert (coordinator.checkins[-1].models, coordinator.checkins[-1].refused) == ({NAME: 1}, UNSET)
        first = coordinator.models[NAME]
        released(coordinator, 7, population="tablets")
        assert node.refresh() == ("ModelRefused", 1)
        node.ask("session")
        assert (coordinator.checkins[-1].models, coordinator.checkins[-1].refused) == ({NAME: 1}, {NAME: 7})
        coordinator.models[NAME] = first
        answer = node.ask("both")
        assert (answer["error"], answer["version"]) == ("StateInUse", 1)
        assert node.refresh() == (False, 1)
    with Node(folder, coordinator.url) as again:
        assert again.answers() == [1.0] * 3


def test_a_session_brings_open_models_up_to_date_when_it_ends(coordinator, folder):
    with Node(folder, coordinator.url, signers=[]) as node:
        for number in (1, 2):
            released(coordinator, number)
            assert node.ask("session")["version"] == number
        released(coordinator, 3, params=np.full(linear.D, np.inf, np.float32))
        answer = node.ask("session")
        assert (answer["outcome"]["outcome"], answer["version"], answer["warnings"]) == ("reported", 2, [])
        assert node.ask("close")["version"] is None
        asked = coordinator.calls.count("model")
        assert node.ask("session")["outcome"]["outcome"] == "reported"
        assert coordinator.calls.count("model") == asked


def test_inputs_that_do_not_fit_are_refused_in_one_line(coordinator, node):
    nodes = [
        ("MatMul", ["example.x", "params"], "p"),
        ("Cast", ["example.word"], "w", {"to": FLOAT}),
        ("Add", ["p", "w"], "output"),
    ]
    edge = [("example.x", FLOAT, ["B", 3]), ("example.word", 7, ["B"]), ("params", FLOAT, [3])]
    gathered = graph(nodes, edge, [("output", FLOAT, ["B"])])
    fields = (Field("x", "float32", (3,)), Field("word", "int64", (), 4))
    base = structs.replace(linear.plan(), examples=ExampleSpec(fields))
    released(coordinator, 1, plan=linear.predicting(gathered, base, inputs=("x", "word")), graph=gathered)
    assert node.refresh() == (True, 1)
    both = X | {"word": ("int64", [0, 1, 3])}
    assert node.answers(both) == [1.0, 2.0, 4.0]
    for changes, words in (
        ({"z": X["x"]}, "the model takes the inputs word,x, not word,x,z"),
        (
            {"word": ("int32", [0, 1, 2])},
            "input word is Int32Array of 3 values, the model takes BigInt64Array of n × 1",
        ),
        ({"x": ("float32", [1.0] * 8)}, "input x is Float32Array of 8 values, the model takes Float32Array of n × 3"),
        ({"x": ("float32", [1.0] * 6)}, "input word holds 3 rows; all must hold the same number, at least 1"),
        ({"x": ("float32", []), "word": ("int64", [])}, "input x holds 0 rows; all must hold the same number"),
        ({"word": ("int64", [0, 1, 4])}, "input word holds a value outside 0 … 3"),
        ({"word": ("int64", [0, 1, -1])}, "input word holds a value outside 0 … 3"),
    ):
        answer = node.ask("predict", columns=both | changes)
        assert answer["error"] == "InputRefused"
        assert answer["detail"].startswith(words)
        assert "\n" not in answer["detail"]
    assert node.answers(both) == [1.0, 2.0, 4.0]


def test_a_plan_with_frozen_vectors_predicts_with_them(coordinator, node):
    frozen = checkpoint.encode({"base": np.full(3, 10, np.float32)})
    coordinator.blobs[BlobRef.of(frozen).sha256] = frozen
    edge = [("example.x", FLOAT, ["B", 3]), ("params", FLOAT, [3]), ("frozen.base", FLOAT, [3])]
    nodes = [("Add", ["params", "frozen.base"], "all"), ("MatMul", ["example.x", "all"], "output")]
    summed = graph(nodes, edge, [("output", FLOAT, ["B"])])
    vectors = FrozenVectors(BlobRef.of(frozen), (VectorSpec("base", 3),))
    released(
        coordinator, 2, plan=linear.predicting(summed, structs.replace(linear.plan(), frozen=vectors)), graph=summed
    )
    assert node.refresh() == (True, 2)
    assert node.answers() == [12.0] * 3


def test_a_model_whose_training_has_devices_keep_vectors_predicts(coordinator, node):
    trained = linear.predicting(linear.predict_graph())
    more = {name: BlobRef.of(name.encode()) for name in ("kept.first", "kept.next")}
    graphs = {form: {**named, **more} for form, named in trained.graphs.items()}
    released(coordinator, 2, plan=structs.replace(trained, kept=(VectorSpec("c_i", 3),), graphs=graphs))
    assert node.refresh() == (True, 2)
    assert node.answers() == [2.0] * 3


def test_each_answer_is_of_one_version_while_three_are_swapped(coordinator, node):
    released(coordinator, 1)
    node.refresh()
    node.ask("storm", columns=X, calls=10_000)
    for number in (2, 3, 4):
        released(coordinator, number)
        assert node.refresh() == (True, number)
    first = node.ask("calm")["first"]
    assert len(first) == 10_000
    assert set(first) <= {1, 2, 3, 4}
    assert len(set(first)) > 1


def test_a_plan_that_cannot_predict_is_refused_and_not_fetched_again(coordinator, node):
    refusals = []
    for good, (case, (plan, blob, _)) in enumerate(UNFIT.items()):
        number = 2 * good + 1
        released(coordinator, number)
        assert (case, *node.refresh()) == (case, True, number)
        released(coordinator, number + 1, plan=plan, graph=blob)
        assert (case, *node.refresh()) == (case, "ModelRefused", number)
        fetched = coordinator.calls.count("blob")
        answer = node.ask("refresh")
        assert (case, answer["error"], coordinator.calls.count("blob")) == (case, "ModelRefused", fetched)
        refusals.append(f"model keyboard: {answer['detail']}")
        assert (case, remarks(answer)) == (case, refusals)
        assert node.answers() == [float(number)] * 3
    released(coordinator, number + 2)
    assert node.refresh() == (True, number + 2)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (np.array([1, np.nan, 1], np.float32), "parameters of the version hold an infinity or NaN"),
        (np.ones(4, np.float32), "expected float32[3]"),
        (b"no tensors", "not a safetensors file"),
    ],
    ids=["not finite", "longer", "none"],
)
def test_parameters_that_do_not_fit_are_refused(coordinator, node, params, words):
    released(coordinator, 1, params=params)
    answer = node.ask("refresh")
    assert (answer["error"], answer["version"]) == ("ModelRefused", None)
    assert words in answer["detail"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"key": OTHER}, "it does not name who signed the model release"),
        ({"population": "tablets"}, "it is for population tablets"),
        ({"name": "camera"}, "it is for model camera"),
        ({"expires_at": 1}, "it has expired"),
        ({"counter": 0}, "its counter is 0; this device has seen 1"),
        ({"version": 2}, "version 2"),
        ({"evaluation": {"a": 1.0}}, "altered"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_statement_that_does_not_hold_is_refused_while_it_does_not(coordinator, node, how, words):
    released(coordinator, 1)
    node.refresh()
    good = released(coordinator, 2, **how)
    if "evaluation" in how:  # altered after it was signed
        coordinator.models["keyboard"] = structs.replace(good, text=good.text.replace('"number":2', '"number":3'))
    fetched = coordinator.calls.count("blob")
    for _ in range(2):
        answer = node.ask("refresh")
        assert (answer["error"], answer["version"], len(remarks(answer))) == ("ModelRefused", 1, 1)
        assert words in answer["detail"]
    assert coordinator.calls.count("blob") == fetched


def test_an_older_number_with_a_counter_as_high_is_taken(coordinator, node):
    first = released(coordinator, 1, counter=5)
    node.refresh()
    released(coordinator, 2, counter=5)
    assert node.refresh() == (True, 2)
    coordinator.models["keyboard"] = first
    assert node.refresh() == (True, 1)
    released(coordinator, 3, counter=6)
    assert node.refresh() == (True, 3)
    coordinator.models["keyboard"] = first
    assert node.refresh() == ("ModelRefused", 3)


def test_limits_of_the_policy_hold_until_the_owner_raises_them(coordinator, folder):
    released(coordinator, 1)
    for limits, rule in (
        ({"per_day": {"bytes": 2}}, "per_day.bytes"),
        ({"plan": {"memory_bytes": 2}}, "plan.memory_bytes"),
    ):
        with Node(folder, coordinator.url, **limits) as node:
            assert f"against {rule}" in node.ask("refresh")["detail"]
    assert "blob" not in coordinator.calls
    for name in ("parameters", "graph_bytes"):
        with Node(folder, coordinator.url, plan={name: 2}) as node:
            assert f"against plan.{name}" in node.ask("refresh")["detail"]
    for rule in ({"require_https": True}, {"populations": ["tablets"]}):
        calls = len(coordinator.calls)
        with Node(folder, coordinator.url, **rule) as node:
            assert node.ask("refresh")["error"] == "PolicyForbids"
        assert len(coordinator.calls) == calls
    with Node(folder, coordinator.url) as node:
        assert node.refresh() == (True, 1)


def test_an_error_of_the_coordinator_is_no_refusal(coordinator, node):
    released(coordinator, 1)
    node.refresh()
    released(coordinator, 2)
    for call, slug in (("blob", "unknown-blob"), ("model", "internal")):
        coordinator.faults[call] = [refusal(slug)]
        answer = node.ask("refresh")
        assert (answer["error"], answer["version"], remarks(answer)) == ("Refused", 1, [])
    assert node.refresh() == (True, 2)


def test_a_device_killed_at_any_write_has_one_version_or_the_other(coordinator, folder):
    released(coordinator, 1)
    with Node(folder, coordinator.url) as node:
        assert node.refresh() == (True, 1)
    found = set()
    for step in range(100):
        released(coordinator, step + 2)
        with Node(folder, coordinator.url, step) as node:
            ended = node.ask("refresh") is None
        with Node(folder, coordinator.url) as again:
            version = again.ask("predict", columns=X)["version"]
            assert version in (step + 1, step + 2)
            assert again.answers() == [version] * 3
            found.add((ended, version - step))
            assert again.refresh() == (version == step + 1, step + 2)
        if not ended:
            break
    assert found == {(True, 1), (True, 2), (False, 2)}
    assert step > 5


def test_both_devices_predict_alike_with_what_a_coordinator_releases(coordinators, folder):
    model = Model(load("logreg"))
    bundle = export_bundle(model, create("fedavg", {"batch_size": 5}), folder / "plan")
    images = datasets.load("digits").shard(0)["x"][:7]
    with coordinators.local(folder) as local:
        store = local.store
        store.register_task(bundle, TaskSettings(population="phones", goal=1, rounds=1))
        for number in (1, 2):
            weights = np.random.default_rng(number).normal(size=model.schema.size).astype(np.float32)
            blobs = {
                "plan": bundle.manifest.plan,
                "parameters": store.blobs.put(checkpoint.encode({"params": weights})),
            }
            about = {"population": "phones", "name": "keyboard", "number": number, "counter": 1}
            store.release_model(KEY.sign_model_release(ModelRelease(**about, **blobs)))
        device = Device(local.url, "phones", folder / "examples.npz", folder / "python", policy=POLICY)
        columns = {"x": ("float32", images.ravel().tolist())}
        with device.model("keyboard") as python, Node(folder, local.url) as node:
            assert (python.refresh(), node.refresh()) == (False, (False, None))
            for number in (1, 2):
                store.promote_model("phones", "keyboard", number, 1.0)
                assert (python.refresh(), node.refresh()) == (True, (True, number))
                wanted = python.predict({"x": images})["output"]
                np.testing.assert_allclose(node.answers(columns), wanted.ravel(), rtol=1e-5, atol=1e-5)
            store.roll_back_model("phones", "keyboard")
            assert (python.refresh(), node.refresh(), python.version) == (True, (True, 1), 1)
