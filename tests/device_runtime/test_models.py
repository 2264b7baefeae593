"""Models for apps, in both runtimes: the versions that a device takes over real HTTP, refuses and keeps."""

import functools
import re
import time

import numpy as np
import pytest
from msgspec import UNSET, structs

from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore import checkpoint
from fedcore.algorithms import create
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, FrozenVectors
from fedcore.signing import ModelRelease, verified
from simulator import datasets
from tests.device_runtime import linear
from tests.device_runtime.coordinator import refusal
from tests.device_runtime.linear import FLOAT, graph
from tests.device_runtime.opened import RUNTIMES, InNode, InPython, X, plain, remarks
from tests.device_runtime.released import KEY, NAME, OTHER, ROWS, released


@pytest.fixture
def folder(tmp_path, examples):
    np.savez(tmp_path / "examples.npz", **examples)
    return tmp_path


@pytest.fixture(params=RUNTIMES, ids=lambda runtime: runtime.runtime)
def opening(request, coordinator, folder):
    """Opens the device's model in one runtime, under settings of a policy if any are given."""
    return functools.partial(request.param, folder, coordinator.url)


@pytest.fixture
def model(opening):
    with opening() as opened:
        yield opened


def refused(model, coordinator, words):
    """Two refreshes are refused with these words, once in the journal; the version stays, and is fetched once."""
    before = model.ask("predict", columns=X)
    first = model.ask("refresh")
    fetched = coordinator.calls.count("blob")
    again = model.ask("refresh")
    assert coordinator.calls.count("blob") == fetched
    assert {first["error"], again["error"]} <= {"ModelRefused", "AgainstLimits"}
    assert re.search(words, plain(first["detail"])), first["detail"]
    assert "\n" not in first["detail"]
    public = first.get("public", first["detail"])
    assert remarks(again) == [*remarks(before), f"model {NAME}: {public}"]
    after = model.ask("predict", columns=X)
    assert (after["version"], after.get("outputs")) == (before["version"], before.get("outputs"))


def test_a_version_is_fetched_and_predicts_until_the_next_one(coordinator, model):
    before = model.ask("predict", columns=X)
    assert before["error"] == "NoModel"
    assert plain(before["detail"]) == "no version of model keyboard is here yet: refresh() fetches one"
    assert model.refresh() == (False, None)
    for number in (1, 2):
        released(coordinator, number)
        assert model.refresh() == (True, number)
        for count in (1, 5, 2, 2, 300):
            assert model.answers({"x": np.tile(ROWS[:1], (count, 1))}) == [number] * count
    assert model.refresh() == (False, 2)
    withdrawn = coordinator.models.pop(NAME)
    assert (model.refresh(), model.answers()) == ((False, 2), [2.0] * 3)
    coordinator.models[NAME] = withdrawn
    assert coordinator.calls.count("blob") == 4, "plan and graph are those of the first"
    for _ in range(2):
        assert model.ask("close")["version"] is None
    for order in ({"order": "predict", "columns": X}, {"order": "refresh"}):
        answer = model.ask(**order)
        assert (answer["error"], plain(answer["detail"])) == ("ModelClosed", "model keyboard is closed")


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda runtime: runtime.runtime)
def test_a_refresh_tells_the_labels_that_the_owner_lists(coordinator, folder, runtime):
    released(coordinator, 1)
    coordinator.models = {f"{NAME}?app_version=3.2&city=S%C3%A3o": coordinator.models.pop(NAME)}
    stated = {"app_version": "3.2", "city": "São", "ring": "beta"}
    with runtime(folder, coordinator.url, stated=stated, labels=["app_version", "city"]) as model:
        assert model.refresh() == (True, 1)


def test_a_version_predicts_on_the_engine_of_browsers(coordinator, folder):
    with InNode(folder, coordinator.url, "web") as node:
        for number in (1, 2):
            released(coordinator, number)
            assert node.refresh() == (True, number)
            assert node.answers() == [number] * 3


@pytest.mark.parametrize("expires_in_s", [2, None])
def test_a_model_opens_offline_with_its_last_version(coordinator, opening, expires_in_s):
    expires_at = UNSET if expires_in_s is None else int(time.time()) + expires_in_s
    released(coordinator, 1, expires_at=expires_at)
    with opening() as first:
        assert first.refresh() == (True, 1)
    calls = len(coordinator.calls)
    if expires_in_s:
        time.sleep(expires_in_s)  # it has expired: that bounds what is taken, not what is here
    with opening() as second:
        assert second.answers() == [1.0] * 3
    assert len(coordinator.calls) == calls


def test_a_kept_version_that_cannot_be_used_is_fetched_again(coordinator, opening, folder, caplog):
    released(coordinator, 1)
    with opening() as model:
        model.refresh()
        state = model.state

    def warned(model):
        """What was logged when it opened."""
        found = model.ask("predict", columns=X)
        assert found["error"] == "NoModel"
        said, *_ = found.get("warnings", caplog.messages)
        caplog.clear()
        return plain(said)

    with opening(signers=[OTHER.signer]) as other:
        assert warned(other).startswith("the kept version of model keyboard cannot be used: ")
    for path in (state / "blobs").iterdir():
        path.write_bytes(b"damaged")
    released(coordinator, 2)
    with opening() as damaged:
        assert "cannot be used" in warned(damaged)
        assert (damaged.refresh(), damaged.answers()) == ((True, 2), [2.0] * 3)


def test_a_check_in_states_versions_that_are_here_and_refused(coordinator, opening):
    """And a session, which trims the cache, leaves the blobs of the version."""
    coordinator.offer(linear.plan(), linear.graphs(), {"params": linear.PARAMS})

    def stated():
        assert model.ask("session")["outcome"]["outcome"] == "reported"
        return coordinator.checkins[-1].models, coordinator.checkins[-1].refused

    with opening(cache_bytes=0, signers=[]) as model:
        assert stated() == (UNSET, UNSET)
        released(coordinator, 1)
        assert model.refresh() == (True, 1)
        assert stated() == ({NAME: 1}, UNSET)
        released(coordinator, 7, population="tablets")
        assert model.refresh() == ("ModelRefused", 1)
        assert stated() == ({NAME: 1}, {NAME: 7})
        answer = model.ask("both")
        assert (answer["error"], answer["version"]) == ("StateInUse", 1)
        released(coordinator, 8)
        assert model.refresh() == (True, 8)
        assert stated() == ({NAME: 8}, UNSET)
    with opening() as again:
        assert again.answers() == [8.0] * 3


def test_a_session_brings_open_models_up_to_date_when_it_ends(coordinator, opening):
    with opening(signers=[]) as model:
        for number in (1, 2):
            released(coordinator, number)
            assert model.ask("session")["version"] == number
        released(coordinator, 3, params=np.full(linear.D, np.inf, np.float32))
        answer = model.ask("session")
        assert (answer["outcome"]["outcome"], answer["version"], answer.get("warnings", [])) == ("reported", 2, [])
        assert model.ask("close")["version"] is None
        asked = coordinator.calls.count("model")
        assert model.ask("session")["outcome"]["outcome"] == "reported"
        assert coordinator.calls.count("model") == asked


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"z": ROWS}, ("knows none of: [z]", "the model takes the inputs word,x, not word,x,z")),
        ({"x": None}, ("inputs are missing: [x]", "the model takes the inputs word,x, not word")),
        (
            {"word": np.zeros(3, np.int32)},
            ("is int32", "word is Int32Array of 3 values, the model takes BigInt64Array"),
        ),
        ({"x": np.ones(8, np.float32)}, ("the model takes float32[n, 3]", "input x is Float32Array of 8 values")),
        ({"x": ROWS[:2]}, ("must hold the same number", "input word holds 3 rows; all must hold the same number")),
        (
            {"x": ROWS[:0], "word": np.zeros(0, np.int64)},
            ("at least 1", "input x holds 0 rows; all must hold the same number, at least 1"),
        ),
        ({"word": np.array([0, 1, 4])}, ("input word holds a value outside 0 … 3",) * 2),
        ({"word": np.array([0, 1, -1])}, ("input word holds a value outside 0 … 3",) * 2),
    ],
    ids=["more", "fewer", "type", "shape", "rows", "none", "high", "negative"],
)
def test_inputs_that_do_not_fit_are_refused_in_one_line(coordinator, model, changes, words):
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
    assert model.refresh() == (True, 1)
    both = X | {"word": np.array([0, 1, 3])}
    assert model.answers(both) == [1.0, 2.0, 4.0]
    given = {name: values for name, values in (both | changes).items() if values is not None}
    answer = model.ask("predict", columns=given)
    assert (answer["error"], "\n" in answer["detail"]) == ("InputRefused", False)
    expected = words[model.runtime != "python"]
    if model.runtime == "jvm":
        expected = re.sub("BigInt64Array", "LongArray", re.sub("(Int|Float)32Array", r"\1Array", expected))
    assert expected in plain(answer["detail"])
    assert model.answers(both) == [1.0, 2.0, 4.0]


def test_a_plan_with_frozen_vectors_predicts_with_them(coordinator, opening):
    frozen = checkpoint.encode({"base": np.array([10, 20, 30], np.float32)})
    coordinator.blobs[BlobRef.of(frozen).sha256] = frozen
    edge = [("example.x", FLOAT, ["B", 3]), ("params", FLOAT, [3]), ("frozen.base", FLOAT, [3])]
    nodes = [("Add", ["params", "frozen.base"], "all"), ("MatMul", ["example.x", "all"], "output")]
    summed = graph(nodes, edge, [("output", FLOAT, ["B"])])
    vectors = FrozenVectors(BlobRef.of(frozen), (VectorSpec("base", 3),))
    plan = linear.predicting(summed, structs.replace(linear.plan(), frozen=vectors))
    released(coordinator, 1, plan=plan, graph=summed)
    with opening() as model:
        assert model.refresh() == (True, 1)
        assert model.answers() == [11.0, 21.0, 31.0]
    with opening() as model:
        assert model.answers() == [11.0, 21.0, 31.0]


def test_a_model_whose_training_has_devices_keep_vectors_predicts(coordinator, model):
    trained = linear.predicting(linear.predict_graph())
    more = {name: BlobRef.of(name.encode()) for name in ("kept.first", "kept.next")}
    graphs = {form: {**named, **more} for form, named in trained.graphs.items()}
    released(coordinator, 2, plan=structs.replace(trained, kept=(VectorSpec("c_i", 3),), graphs=graphs))
    assert model.refresh() == (True, 2)
    assert model.answers() == [2.0] * 3


def test_each_answer_is_of_one_version_while_three_are_swapped(coordinator, model):
    released(coordinator, 1)
    model.refresh()
    model.ask("storm", columns={"x": np.tile(ROWS, (10, 1))}, calls=10_000)
    for number in (2, 3, 4):
        released(coordinator, number)
        assert model.refresh() == (True, number)
    first = model.ask("calm")["first"]
    assert len(first) == 10_000
    assert {1.0} < set(first) <= {1.0, 2.0, 3.0, 4.0}
    assert model.answers() == [4.0] * 3


def unfit_plans():
    """Plans and graphs that cannot predict here, and words of Python's that say so."""
    good, x = linear.predict_graph(), [("example.x", FLOAT, ["B", 3]), ("params", FLOAT, [3])]
    yield "none", linear.plan(), good, "has no predict graph"
    other = linear.predicting(good, linear.plan(fmt="executorch"), graphs={"executorch": BlobRef.of(good)})
    yield "format", other, good, "this device runs onnx"
    forbidden = graph([("Loop", ["example.x", "params"], "output")], x, [("output", FLOAT, ["B"])])
    yield "operator", None, forbidden, "operator Loop is none that a plan may use"
    divided = graph([("Div", ["example.x", "params"], "output")], x, [("output", FLOAT, ["B", 3])])
    yield "division", None, divided, "it divides by data"
    yield "no graph", None, b"no graph at all", "cannot load graph predict"
    shape = linear.predicting(good, outputs=(Field("output", "float32", (2,)),))
    yield "shape", shape, good, "fails on trial"
    dtype = linear.predicting(good, outputs=(Field("output", "int64"),))
    yield "dtype", dtype, good, "fails on trial"
    yield "output", linear.predicting(good, outputs=(Field("more", "float32"),)), good, "lacks outputs \\[more\\]"
    yield "input", linear.predicting(good, inputs=("y",)), good, "wants inputs \\[example.x\\]"
    infinite = graph(
        [("Log", ["negative"], "logs"), ("MatMul", ["example.x", "logs"], "output")],
        x,
        [("output", FLOAT, ["B"])],
        [("negative", FLOAT, [-1.0, -1.0, -1.0])],
    )
    yield "infinite", None, infinite, "output that is not finite on trial"
    fewer = linear.predicting(good, structs.replace(linear.plan(), schema=ParamSchema((TensorSpec("w", (2,)),))))
    yield "schema", fewer, good, "expected float32\\[2\\]"
    bad = Field("x", "int64", (3,), 0)
    spec = structs.replace(linear.plan(), examples=ExampleSpec((bad, Field("y", "float32"))))
    yield "bound", linear.predicting(good, spec), good, "cannot be tried"


UNFIT = {name: rest for name, *rest in unfit_plans()}


@pytest.mark.parametrize("case", UNFIT)
def test_a_plan_that_cannot_predict_is_refused_and_not_fetched_again(coordinator, opening, case):
    """In a later process neither, though its blobs have left the cache."""
    plan, blob, words = UNFIT[case]
    released(coordinator, 1)
    with opening() as model:
        assert model.refresh() == (True, 1)
        kept = {path.name for path in (model.state / "blobs").iterdir()}
        released(coordinator, 2, plan=plan, graph=blob)
        refused(model, coordinator, words if model.runtime == "python" else "")
    fetched = coordinator.calls.count("blob")
    for path in (model.state / "blobs").iterdir():
        if path.name not in kept:
            path.unlink()
    with opening() as again:
        assert again.refresh() == ("ModelRefused", 1)
        assert coordinator.calls.count("blob") == fetched
        released(coordinator, 3)
        assert again.refresh() == (True, 3)


def test_a_plan_that_is_none_is_refused(coordinator, model):
    blob = BlobRef.of(b"{}")
    coordinator.blobs[blob.sha256] = b"{}"
    released(coordinator, 1)
    release = verified(coordinator.models[NAME], ModelRelease)
    coordinator.models[NAME] = KEY.sign_statement(structs.replace(release, plan=blob))
    refused(model, coordinator, "malformed plan" if model.runtime == "python" else "plan")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (np.array([1, np.nan, 1], np.float32), "is not finite|hold an infinity or NaN"),
        (np.ones(4, np.float32), "expected float32\\[3\\]"),
        (b"no tensors", "not a safetensors file"),
        (checkpoint.encode({"params": np.ones(3, np.float32), "m": np.ones(3, np.float32)}), "vectors are"),
    ],
    ids=["not finite", "longer", "none", "more"],
)
def test_parameters_that_do_not_fit_are_refused(coordinator, model, params, words):
    released(coordinator, 1)
    model.refresh()
    released(coordinator, 2, params=params)
    refused(model, coordinator, words)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"key": OTHER}, "which the policy does not name|it does not name who signed the model release"),
        ({"population": "tablets"}, "it is for population tablets"),
        ({"name": "camera"}, "it is for model camera"),
        ({"expires_at": 1}, "it has expired"),
        ({"counter": 0}, "its counter is 0; this device has seen 1"),
        ({"version": 2}, "version 2"),
        ({"evaluation": {"a": 1.0}}, "does not have the signature|altered"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_statement_that_does_not_hold_is_refused(coordinator, model, how, words):
    released(coordinator, 1)
    model.refresh()
    good = released(coordinator, 2, **how)
    if "evaluation" in how:  # altered after it was signed
        coordinator.models[NAME] = structs.replace(good, text=good.text.replace('"number":2', '"number":3'))
    fetched = coordinator.calls.count("blob")
    refused(model, coordinator, words)
    assert coordinator.calls.count("blob") == fetched


def test_without_signers_any_signed_release_is_taken(coordinator, opening):
    released(coordinator, 1, key=OTHER)
    with opening(signers=[]) as model:
        assert model.refresh() == (True, 1)
        signed = released(coordinator, 2, key=OTHER)
        coordinator.models[NAME] = structs.replace(signed, text=signed.text + " ")
        refused(model, coordinator, "does not have the signature|altered")


def test_an_older_number_with_a_counter_as_high_is_taken(coordinator, model):
    first = released(coordinator, 1, counter=5)
    model.refresh()
    released(coordinator, 2, counter=5)
    assert model.refresh() == (True, 2)
    coordinator.models[NAME] = first
    fetched = coordinator.calls.count("blob")
    assert (model.refresh(), model.answers()) == ((True, 1), [1.0] * 3)
    assert coordinator.calls.count("blob") == fetched
    released(coordinator, 3, counter=6)
    assert model.refresh() == (True, 3)
    coordinator.models[NAME] = first
    assert model.refresh() == ("ModelRefused", 3)


def test_counters_are_of_each_signer(coordinator, opening):
    released(coordinator, 9)
    with opening(signers=[]) as model:
        model.refresh()
        released(coordinator, 2, key=OTHER)
        assert model.refresh() == (True, 2)


def test_bytes_that_are_not_the_digests_are_never_used(coordinator, model):
    released(coordinator, 1)
    good = coordinator.blobs.copy()
    for digest in good:
        coordinator.blobs[digest] = good[digest][:-1] + b"?"
    assert model.refresh() == ("BadAnswer", None)
    coordinator.blobs |= good
    assert (model.refresh(), model.answers()) == ((True, 1), [1.0] * 3)


@pytest.mark.parametrize(
    ("policy", "asks"),
    [
        ({"require_https": True}, 0),
        ({"populations": ["tablets"]}, 0),
        ({"per_day": {"bytes": 2}}, 1),
        ({"plan": {"memory_bytes": 2}}, 1),
        ({"plan": {"parameters": 2}}, 2),
        ({"plan": {"graph_bytes": 2}}, 2),
    ],
    ids=str,
)
def test_the_policy_holds_until_the_owner_changes_it(coordinator, opening, policy, asks):
    """It is refused before the device asks, before it fetches the plan, or with the plan."""
    released(coordinator, 1)
    ((rule, value),) = policy.items()
    rule = ".".join([rule, *value]) if isinstance(value, dict) else rule
    with opening(**policy) as model:
        answer = model.ask("refresh")
        assert answer["error"] == ("AgainstLimits" if asks else "PolicyForbids")
        assert rule in answer["detail"]
        assert len(remarks(answer)) == len(remarks(model.ask("refresh"))) == (asks > 0)
    assert (bool(coordinator.calls), "blob" in coordinator.calls) == (asks > 0, asks > 1)
    with opening() as model:
        assert model.refresh() == (True, 1)


def test_an_error_of_the_coordinator_is_no_refusal(coordinator, model):
    released(coordinator, 1)
    model.refresh()
    released(coordinator, 2)
    for call, slug in (("blob", "unknown-blob"), ("model", "internal"), ("model", "unknown-population")):
        coordinator.faults[call] = [refusal(slug)]
        answer = model.ask("refresh")
        assert (answer["error"], answer["version"], remarks(answer)) == ("Refused", 1, [])
    assert model.refresh() == (True, 2)


def test_both_devices_predict_alike_with_what_a_coordinator_releases(coordinators, folder):
    model = Model(load("logreg"))
    bundle = export_bundle(model, create("fedavg", {"batch_size": 5}), folder / "plan")
    images = {"x": datasets.load("digits").shard(0)["x"][:7]}
    with coordinators.local(folder) as local:
        store = local.store
        store.register_task(bundle, TaskSettings(population="phones", goal=1, rounds=1))
        for number in (1, 2):
            weights = np.random.default_rng(number).normal(size=model.schema.size).astype(np.float32)
            blobs = {
                "plan": bundle.manifest.plan,
                "parameters": store.blobs.put(checkpoint.encode({"params": weights})),
            }
            about = {"population": "phones", "name": NAME, "number": number, "counter": 1}
            store.release_model(KEY.sign_statement(ModelRelease(**about, **blobs)))
        with InPython(folder, local.url) as python, InNode(folder, local.url) as node:
            assert python.refresh() == node.refresh() == (False, None)
            for number in (1, 2):
                store.promote_model("phones", NAME, number, 1.0)
                assert python.refresh() == node.refresh() == (True, number)
                np.testing.assert_allclose(node.answers(images), python.answers(images), rtol=1e-5, atol=1e-5)
            store.roll_back_model("phones", NAME)
            assert python.refresh() == node.refresh() == (True, 1)
