"""Models for apps: versions taken over real HTTP, what is refused, and predictions while versions are swapped."""

import contextlib
import gc
import itertools
import json
import os
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import UNSET, structs

from device_runtime import Device
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.clock import Clock
from device_runtime.errors import (
    BadAnswer,
    ConfigError,
    InputRefused,
    ModelClosed,
    ModelRefused,
    NoModel,
    PolicyForbids,
    StateInUse,
    Unreachable,
)
from device_runtime.models.model import Model
from device_runtime.permission.policy import PerDay, PlanLimits, Policy
from device_runtime.session import run_session
from device_runtime.state.database import open_database, read_database
from device_runtime.state.folder import only_session
from device_runtime.state.journal import read_journal
from device_runtime.state.records import ModelStore, kept_blobs, stated_versions
from fedcore import checkpoint
from fedcore.deltas import delta_between
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, FrozenVectors
from fedcore.signing import verified_model_release
from muster.commands.device import parser
from tests.device_runtime import linear
from tests.device_runtime.coordinator import refusal
from tests.device_runtime.linear import FLOAT, graph
from tests.device_runtime.released import KEY, NAME, OTHER, POLICY, ROWS, released

X = {"x": ROWS}


@pytest.fixture
def owned(config):
    """The device, whose owner names the key of the releases."""
    return replace(config, policy=POLICY)


def stored(config, name=NAME):
    with read_database(config.state) as database:
        return ModelStore(database, config.population, name).get()


def remarks(config):
    return [(one.outcome, one.detail) for one in read_journal(config.state) if one.outcome == "model-refused"]


def answers(model, rows=ROWS):
    """The version that every answer tells."""
    return model.predict({"x": rows})["output"].tolist()


def test_a_version_is_fetched_and_predicts_for_any_number(coordinator, owned):
    released(coordinator, 7)
    with Model(owned, NAME) as model:
        assert model.version is None
        assert (model.refresh(), model.version) == (True, 7)
        for count in (1, 5, 2, 2, 300):
            assert answers(model, np.tile(ROWS[:1], (count, 1))) == [7.0] * count
        assert (model.refresh(), coordinator.calls.count("blob")) == (False, 3)


def test_a_model_opens_offline_with_its_last_version(coordinator, owned):
    released(coordinator, 4)
    with Model(owned, NAME) as model:
        model.refresh()
    asked = len(coordinator.calls)
    away = replace(owned, coordinator="http://127.0.0.1:9")
    with Model(away, NAME) as model:
        assert (model.version, answers(model)) == (4, [4.0] * 3)
        with pytest.raises(Unreachable):
            model.refresh()
        assert (model.version, len(coordinator.calls)) == (4, asked)


def test_an_expired_version_goes_on_where_it_is(coordinator, owned):
    released(coordinator, 4)
    now = time.time()
    with Model(owned, NAME) as model:
        model.refresh()
    released(coordinator, 5, expires_at=int(now) - 1)
    with Model(owned, NAME) as model:
        with pytest.raises(ModelRefused, match="it has expired"):
            model.refresh()
        assert answers(model) == [4.0] * 3


def test_a_blob_that_drips_is_given_up_and_fetched_later(coordinator, owned, monkeypatch):
    """Each look at the clock is 25 seconds after the one before."""

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(20):
                handler.wfile.write(b"x")
                handler.wfile.flush()
                time.sleep(0.02)
        handler.close_connection = True

    released(coordinator, 7)
    seconds = itertools.count(step=25)
    with monkeypatch.context() as patch, Model(owned, NAME) as model:
        patch.setattr("device_runtime.protocol.call.time", SimpleNamespace(monotonic=lambda: next(seconds)))
        coordinator.faults["blob"] = [drip] * 4
        with pytest.raises(Unreachable, match="the answer came too slowly"):
            model.refresh()
    coordinator.faults["blob"] = []
    with Model(owned, NAME) as model:
        assert (model.refresh(), model.version) == (True, 7)


def test_a_release_without_an_end_is_taken(coordinator, owned):
    released(coordinator, 4, expires_at=UNSET)
    with Model(owned, NAME) as model:
        assert model.refresh()


def test_without_a_release_there_is_nothing_to_predict_with(coordinator, owned):
    with Model(owned, NAME) as model:
        with pytest.raises(NoModel, match="no version of model 'keyboard' is here yet"):
            model.predict(X)
        assert (model.refresh(), model.version) == (False, None)
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
        del coordinator.models[NAME]
        assert (model.refresh(), model.version) == (False, 1)


def refused(coordinator, config, words):
    """A refresh that is refused with these words, once in the journal; version 1 stays, also in the next process."""
    with Model(config, NAME) as model:
        before, calls = model.version, len(remarks(config)) if config.state.exists() else 0
        told = answers(model) if before else []
        with pytest.raises(ModelRefused, match=words) as error:
            model.refresh()
        assert "\n" not in str(error.value)
        assert model.version == before
        with pytest.raises(ModelRefused, match=words):
            model.refresh()
    assert len(remarks(config)) == calls + 1
    assert remarks(config)[-1] == ("model-refused", f"model {NAME}: {error.value.detail}")
    with Model(config, NAME) as model:
        assert model.version == before
        assert not before or answers(model) == told


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"key": OTHER}, "which the policy does not name"),
        ({"population": "tablets"}, "it is for population 'tablets'"),
        ({"name": "camera"}, "it is for model 'camera'"),
        ({"expires_at": 1}, "it has expired"),
        ({"counter": 0}, "its counter is 0; this device has seen 1"),
        ({"version": 2}, "version 2"),
    ],
)
def test_a_statement_that_does_not_hold_is_refused(coordinator, owned, how, words):
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
    fetched = coordinator.calls.count("blob")
    released(coordinator, 2, **how)
    refused(coordinator, owned, words)
    assert coordinator.calls.count("blob") == fetched


def test_a_statement_that_was_altered_is_refused(coordinator, owned):
    signed = released(coordinator, 1)
    coordinator.models[NAME] = structs.replace(signed, text=signed.text.replace('"number":1', '"number":2'))
    refused(coordinator, owned, "does not have the signature")


def test_without_signers_any_signed_release_is_taken(coordinator, config):
    released(coordinator, 1, key=OTHER)
    with Model(config, NAME) as model:
        assert model.refresh()
    signed = released(coordinator, 2, key=OTHER)
    coordinator.models[NAME] = structs.replace(signed, text=signed.text + " ")
    refused(coordinator, config, "does not have the signature")


def test_an_older_number_with_a_counter_as_high_is_taken(coordinator, owned):
    first = released(coordinator, 1, counter=2)
    with Model(owned, NAME) as model:
        model.refresh()
        released(coordinator, 2)
        assert (model.refresh(), model.version) == (True, 2)
        coordinator.models[NAME] = first
        fetched = coordinator.calls.count("blob")
        assert (model.refresh(), model.version, answers(model)) == (True, 1, [1.0] * 3)
        assert coordinator.calls.count("blob") == fetched


def test_counters_are_of_each_signer_and_each_model(coordinator, config):
    released(coordinator, 9)
    with Model(config, NAME) as model:
        model.refresh()
        released(coordinator, 2, key=OTHER)
        assert (model.refresh(), model.version) == (True, 2)
    coordinator.models["camera"] = released(coordinator, 3, name="camera")
    with Model(config, "camera") as model:
        assert (model.refresh(), model.version) == (True, 3)


def unfit_plans():
    """Plans and graphs that cannot predict here, and the words that say so."""
    good, x = linear.predict_graph(), [("example.x", FLOAT, ["B", 3]), ("params", FLOAT, [3])]
    yield "none", linear.plan(), good, "has no predict graph"
    other = linear.predicting(good, linear.plan(fmt="executorch"), graphs={"executorch": BlobRef.of(good)})
    yield "format", other, good, "this device runs 'onnx'"
    forbidden = graph([("Loop", ["example.x", "params"], "output")], x, [("output", FLOAT, ["B"])])
    yield "operator", None, forbidden, "operator 'Loop' is none that a plan may use"
    divided = graph([("Div", ["example.x", "params"], "output")], x, [("output", FLOAT, ["B", 3])])
    yield "division", None, divided, "it divides by data"
    yield "no graph", None, b"no graph at all", "cannot load graph 'predict'"
    shape = linear.predicting(good, outputs=(Field("output", "float32", (2,)),))
    yield "shape", shape, good, "fails on trial"
    dtype = linear.predicting(good, outputs=(Field("output", "int64"),))
    yield "dtype", dtype, good, "fails on trial"
    yield "output", linear.predicting(good, outputs=(Field("more", "float32"),)), good, "lacks outputs \\['more'\\]"
    yield "input", linear.predicting(good, inputs=("y",)), good, "wants inputs \\['example.x'\\]"
    infinite = graph(
        [("Log", ["negative"], "logs"), ("MatMul", ["example.x", "logs"], "output")],
        x,
        [("output", FLOAT, ["B"])],
        [("negative", FLOAT, [-1.0, -1.0, -1.0])],
    )
    yield "infinite", None, infinite, "'output' that is not finite on trial"
    fewer = linear.predicting(good, structs.replace(linear.plan(), schema=ParamSchema((TensorSpec("w", (2,)),))))
    yield "schema", fewer, good, "expected float32\\[2\\]"
    bad = Field("x", "int64", (3,), 0)
    spec = structs.replace(linear.plan(), examples=ExampleSpec((bad, Field("y", "float32"))))
    yield "bound", linear.predicting(good, spec), good, "cannot be tried"


UNFIT = {name: rest for name, *rest in unfit_plans()}


@pytest.mark.parametrize("case", UNFIT)
def test_a_plan_that_cannot_predict_is_refused_and_not_fetched_again(coordinator, owned, case):
    plan, blob, words = UNFIT[case]
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
    bad = released(coordinator, 2, plan=plan, graph=blob)
    refused(coordinator, owned, words)
    fetched = coordinator.calls.count("blob")
    for path in (owned.state / "blobs").glob("*"):
        if path.name not in kept(owned):
            path.unlink()
    refused_again(owned, words)
    assert coordinator.calls.count("blob") == fetched
    released(coordinator, 3)
    with Model(owned, NAME) as model:
        assert (model.refresh(), model.version) == (True, 3)
    assert stored(owned).current.release != bad


def cached(config):
    """The digests of the blobs in the cache."""
    return {path.name for path in (config.state / "blobs").iterdir() if not path.suffix}


def refused_again(config, words):
    with Model(config, NAME) as model, pytest.raises(ModelRefused, match=words):
        model.refresh()


def kept(config):
    with read_database(config.state) as database:
        return kept_blobs(database)


def test_a_plan_that_is_none_is_refused(coordinator, owned):
    blob = BlobRef.of(b"{}")
    coordinator.blobs[blob.sha256] = b"{}"
    released(coordinator, 1)
    release = verified_model_release(coordinator.models[NAME])
    coordinator.models[NAME] = KEY.sign_model_release(structs.replace(release, plan=blob))
    refused(coordinator, owned, "malformed plan")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (np.array([1, np.nan, 1], np.float32), "'params' of version 2 is not finite"),
        (np.ones(4, np.float32), "expected float32\\[3\\]"),
        (b"no tensors", "not a safetensors file"),
        (checkpoint.encode({"params": np.ones(3, np.float32), "m": np.ones(3, np.float32)}), "vectors are"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(coordinator, owned, params, words):
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
    released(coordinator, 2, params=params)
    refused(coordinator, owned, words)


def test_bytes_that_are_not_the_digests_are_never_used(coordinator, owned):
    released(coordinator, 1)
    good = coordinator.blobs.copy()
    for digest in good:
        coordinator.blobs[digest] = good[digest][:-1] + b"?"
    with Model(owned, NAME) as model:
        with pytest.raises(BadAnswer):
            model.refresh()
        assert model.version is None
        coordinator.blobs |= good
        assert (model.refresh(), answers(model)) == (True, [1.0] * 3)


def test_a_plan_with_frozen_vectors_predicts_with_them(coordinator, owned):
    vectors = {"w": np.array([10, 20, 30], np.float32)}
    blob = checkpoint.encode(vectors)
    coordinator.blobs[BlobRef.of(blob).sha256] = blob
    frozen = FrozenVectors(BlobRef.of(blob), (VectorSpec("w", 3),))
    added = graph(
        [("Add", ["params", "frozen.w"], "both"), ("MatMul", ["example.x", "both"], "output")],
        [("example.x", FLOAT, ["B", 3]), ("params", FLOAT, [3]), ("frozen.w", FLOAT, [3])],
        [("output", FLOAT, ["B"])],
    )
    plan = linear.predicting(added, structs.replace(linear.plan(), frozen=frozen))
    released(coordinator, 1, plan=plan, graph=added)
    with Model(owned, NAME) as model:
        model.refresh()
        assert answers(model) == [11.0, 21.0, 31.0]
    with Model(owned, NAME) as model:
        assert answers(model) == [11.0, 21.0, 31.0]


@pytest.mark.parametrize(
    ("examples", "words"),
    [
        ({}, "inputs are missing: \\['x'\\]"),
        (X | {"z": ROWS}, "knows none of: \\['z'\\]"),
        ({"x": ROWS[:0]}, "at least 1"),
        ({"x": ROWS[0]}, "the model takes float32\\[n, 3\\]"),
        ({"x": ROWS[:, :2]}, "is float32\\[3, 2\\]"),
        ({"x": ROWS.astype(np.float64)}, "is float64"),
        ({"x": ROWS.tolist()}, "of type list"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_one_line(coordinator, owned, examples, words):
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
        with pytest.raises(InputRefused, match=words) as error:
            model.predict(examples)
        assert "\n" not in str(error.value)
        assert answers(model) == [1.0] * 3


def test_two_inputs_hold_as_many_and_integers_stay_below_high(coordinator, owned):
    fields = (Field("x", "float32", (3,)), Field("word", "int64", (), 4))
    gathered = graph(
        [
            ("MatMul", ["example.x", "params"], "p"),
            ("Cast", ["example.word"], "w", {"to": FLOAT}),
            ("Add", ["p", "w"], "output"),
        ],
        [("example.x", FLOAT, ["B", 3]), ("example.word", 7, ["B"]), ("params", FLOAT, [3])],
        [("output", FLOAT, ["B"])],
    )
    base = structs.replace(linear.plan(), examples=ExampleSpec(fields))
    released(coordinator, 1, plan=linear.predicting(gathered, base, inputs=("x", "word")), graph=gathered)
    with Model(owned, NAME) as model:
        model.refresh()
        assert model.predict(X | {"word": np.array([0, 1, 3])})["output"].tolist() == [1.0, 2.0, 4.0]
        for words in ([0, 1, 4], [0, -1, 0]):
            with pytest.raises(InputRefused, match="holds a value outside 0 … 3"):
                model.predict(X | {"word": np.array(words)})
        with pytest.raises(InputRefused, match="must hold the same number"):
            model.predict(X | {"word": np.array([0])})


def test_a_closed_model_says_so(coordinator, owned):
    released(coordinator, 1)
    model = Model(owned, NAME)
    model.refresh()
    model.close()
    model.close()
    assert model.version is None
    for call in (lambda: model.predict(X), model.refresh):
        with pytest.raises(ModelClosed, match="'keyboard' is closed"):
            call()


def test_a_name_that_no_model_has_is_a_bad_configuration(owned):
    with pytest.raises(ConfigError, match="'Key/board' is no name of a model"):
        Model(owned, "Key/board")


def test_each_answer_is_of_one_version_while_three_are_swapped(coordinator, owned):
    released(coordinator, 1)
    model, wrong, seen, errors = Model(owned, NAME), [], set(), []
    model.refresh()
    rows = np.tile(ROWS, (10, 1))
    left = threading.Semaphore(10_000)

    def ask():
        try:
            while left.acquire(blocking=False):
                found = set(model.predict({"x": rows})["output"].tolist())
                seen.update(found)
                if len(found) > 1:
                    wrong.append(found)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in (2, 3, 4):
        released(coordinator, number)
        assert model.refresh()
    for thread in threads:
        thread.join()
    assert (wrong, errors, model.version) == ([], [], 4)
    assert {1.0} < seen <= {1.0, 2.0, 3.0, 4.0}
    assert answers(model) == [4.0] * 3


def test_an_old_version_lives_until_its_last_call_and_no_longer(coordinator, owned, monkeypatch):
    released(coordinator, 1)
    model = Model(owned, NAME)
    model.refresh()
    old = model._version
    entered, go_on, run, found = threading.Event(), threading.Event(), old._graph.run, []

    class Held:
        def run(self, inputs, outputs):
            entered.set()
            go_on.wait(30)
            run(inputs, outputs)

    old._graph, gone = Held(), weakref.ref(old)
    caller = threading.Thread(target=lambda: found.append(answers(model)))
    caller.start()
    entered.wait(30)
    released(coordinator, 2)
    assert model.refresh()
    assert answers(model) == [2.0] * 3
    del old
    assert gone() is not None
    go_on.set()
    caller.join()
    gc.collect()
    assert (found, gone()) == ([[1.0] * 3], None)


def test_blobs_of_models_stay_when_the_cache_is_trimmed(coordinator, owned):
    none = replace(owned, policy=structs.replace(POLICY, cache_bytes=0))
    released(coordinator, 1)
    with Model(none, NAME) as model:
        model.refresh()
    assert cached(owned) == kept(owned)
    assert len(cached(owned)) == 3
    assert run_session(none).outcome == "aborted"  # its plan is not signed
    with Model(none, NAME) as model:
        assert answers(model) == [1.0] * 3
        released(coordinator, 2)
        model.refresh()
    assert len(cached(owned)) == 3


def test_blobs_of_a_version_are_durable_before_it_replaces_one(coordinator, owned, monkeypatch):
    synced, put, fsync = [], ModelStore.put, os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), fsync(handle)))

    def checked(store, stored):
        if stored.current is not None:
            for digest in stored.current.blobs:
                assert (owned.state / "blobs" / digest).stat().st_ino in synced
        return put(store, stored)

    monkeypatch.setattr(ModelStore, "put", checked)
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        assert model.refresh()
    assert (owned.state / "blobs").stat().st_ino in synced


def as_delta(coordinator, before, after):
    """Offer the parameters `after` as a delta to `before` alone."""
    old, new = (checkpoint.encode({"params": params}) for params in (before, after))
    coordinator.blobs[f"{BlobRef.of(new).sha256}/deltas/{BlobRef.of(old).sha256}"] = delta_between(old, new)
    del coordinator.blobs[BlobRef.of(new).sha256]


def test_parameters_come_as_a_delta_and_a_refusal_leaves_the_last(coordinator, owned):
    first = linear.PARAMS
    moved, bad = first * np.float32(1.001), np.array([np.inf, *first[1:]], np.float32)
    released(coordinator, 1, params=first)
    with Model(owned, NAME) as model:
        model.refresh()
    released(coordinator, 2, params=bad)
    as_delta(coordinator, first, bad)
    refused(coordinator, owned, "is not finite")
    assert BlobRef.of(checkpoint.encode({"params": first})).sha256 in cached(owned)
    released(coordinator, 3, params=moved)
    as_delta(coordinator, bad, moved)
    with Model(owned, NAME) as model:
        assert (model.version, model.refresh(), model.version) == (1, True, 3)
    assert coordinator.calls.count("delta") == 2


def test_training_on_leaves_the_parameters_of_a_model(coordinator, config):
    released(coordinator, 1, params=linear.PARAMS)  # the checkpoint that the device trains on
    with Model(config, NAME) as model:
        model.refresh()
    assert run_session(config).outcome == "reported"
    moved, before = linear.PARAMS * np.float32(1.001), coordinator.checkpoint
    coordinator.offer(linear.plan(), linear.graphs(), {"params": moved})
    as_delta(coordinator, linear.PARAMS, moved)
    assert run_session(config).outcome == "reported"
    assert (coordinator.calls.count("delta"), before.sha256 in cached(config)) == (1, True)
    with Model(config, NAME) as model:
        assert answers(model) == linear.PARAMS.tolist()


def test_damaged_files_of_a_version_are_fetched_again(coordinator, owned, caplog):
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
    digest = sorted(kept(owned))[0]
    (owned.state / "blobs" / digest).write_bytes(b"other")
    with Model(owned, NAME) as model:
        assert model.version is None
        assert "the kept version of model keyboard cannot be used" in caplog.text
        assert (model.refresh(), answers(model)) == (True, [1.0] * 3)


def test_a_signer_that_the_policy_names_no_more_is_not_used(coordinator, owned, caplog):
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
    with Model(replace(owned, policy=Policy(signers=(OTHER.signer,))), NAME) as model:
        assert model.version is None
    assert "which the policy does not name" in caplog.text


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"require_https": True}, "require_https"),
        ({"populations": ("tablets",)}, "populations"),
    ],
)
def test_a_policy_that_forbids_asks_nothing(coordinator, owned, policy, words):
    config = replace(owned, policy=structs.replace(POLICY, **policy))
    with Model(config, NAME) as model, pytest.raises(PolicyForbids, match=words):
        model.refresh()
    assert coordinator.calls == []


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"plan": PlanLimits(parameters=2)}, "plan.parameters"),
        ({"plan": PlanLimits(graph_bytes=2)}, "plan.graph_bytes"),
        ({"plan": PlanLimits(memory_bytes=2)}, "plan.memory_bytes"),
        ({"per_day": PerDay(bytes=2)}, "per_day.bytes"),
    ],
)
def test_limits_of_the_policy_hold_until_the_owner_raises_them(coordinator, owned, limits, words):
    released(coordinator, 1)
    refused(coordinator, replace(owned, policy=structs.replace(POLICY, **limits)), words)
    with Model(owned, NAME) as model:
        assert model.refresh()


def test_bytes_of_models_count_for_the_day(coordinator, owned):
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
    with read_database(owned.state) as database:
        ((spent,),) = database.execute("SELECT sum(bytes) FROM spent")
    assert spent > 1000


def test_a_refresh_during_a_session_says_so(coordinator, owned):
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        with only_session(owned.state), pytest.raises(StateInUse):
            model.refresh()
        assert model.refresh()


def test_a_session_brings_open_models_up_to_date_when_it_ends(coordinator, config):
    device = Device(config.coordinator, config.population, config.examples, config.state)
    with device.model(NAME) as model:
        for number in (1, 2):
            released(coordinator, number)
            assert (device.run_once().outcome, model.version) == ("reported", number)
        released(coordinator, 3, params=np.full(linear.D, np.inf, np.float32))
        assert (device.run_once().outcome, model.version) == ("reported", 2)
        released(coordinator, 4)
        stop, ended = threading.Event(), []
        device.run_forever(stop, lambda outcome: (ended.append(model.version), stop.set()))
        assert ended == [4]
    asked = coordinator.calls.count("model")
    assert device.run_once().outcome == "reported"
    assert coordinator.calls.count("model") == asked, "the model is closed"


def test_a_session_that_used_no_network_asks_for_no_model(coordinator, config):
    policy = Policy(per_day=PerDay(sessions=0))
    device = Device(config.coordinator, config.population, config.examples, config.state, policy=policy)
    released(coordinator, 1)
    with device.model(NAME) as model:
        assert (device.run_once().reason, model.version, coordinator.calls) == ("policy", None, [])


def test_a_version_that_another_process_took_is_loaded_here(coordinator, owned):
    released(coordinator, 1)
    with Model(owned, NAME) as one, Model(owned, NAME) as two:
        assert (one.refresh(), two.refresh()) == (True, True)
        assert (one.version, two.version) == (1, 1)
        assert (one.refresh(), two.refresh()) == (False, False)


def test_an_error_of_the_coordinator_leaves_the_version(coordinator, owned):
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
        coordinator.faults["model"] = [refusal("unknown-population")]
        with pytest.raises(Exception, match="because") as error:
            model.refresh()
        assert error.value.slug == "unknown-population"
        assert answers(model) == [1.0] * 3


def test_a_bare_session_gives_what_a_model_gives(coordinator, owned):
    released(coordinator, 1, params=linear.PARAMS)
    made = {"output": np.empty(3, np.float32)}
    OnnxRuntime().load(linear.predict_graph(), "predict").run({"example.x": ROWS, "params": linear.PARAMS}, made)
    with Model(owned, NAME) as model:
        model.refresh()
        np.testing.assert_array_equal(model.predict(X)["output"], made["output"])


def test_a_command_fetches_a_version_and_predicts(coordinator, tmp_path, capsys):
    np.savez(tmp_path / "rows.npz", x=ROWS)

    def told(*more):
        where = ["--coordinator", coordinator.url, "--population", "phones", "--state", str(tmp_path / "state")]
        options = parser().parse_args(["model", NAME, *where, "--json", *more])
        code = options.act(options)
        found = json.loads(capsys.readouterr().out)
        return code, found["version"], found["swapped"], found["outputs"]

    given = "--predict", str(tmp_path / "rows.npz")
    assert told(*given) == (75, None, False, {})
    released(coordinator, 3)
    assert told("--offline", *given) == (75, None, False, {})
    assert told(*given) == (0, 3, True, {"output": [3.0, 3.0, 3.0]})
    calls = len(coordinator.calls)
    assert told("--offline", *given) == (0, 3, False, {"output": [3.0, 3.0, 3.0]})
    assert len(coordinator.calls) == calls


def test_a_check_in_states_versions_that_are_here_and_refused(coordinator, config, owned):
    assert run_session(config).outcome == "reported"
    assert (coordinator.checkins[-1].models, coordinator.checkins[-1].refused) == (UNSET, UNSET)
    with Model(owned, NAME) as model:
        released(coordinator, 1)
        model.refresh()
        run_session(config)
        assert (coordinator.checkins[-1].models, coordinator.checkins[-1].refused) == ({NAME: 1}, UNSET)
        released(coordinator, 7, key=OTHER)
        with pytest.raises(ModelRefused):
            model.refresh()
        run_session(config)
        assert (coordinator.checkins[-1].models, coordinator.checkins[-1].refused) == ({NAME: 1}, {NAME: 7})
        released(coordinator, 8)
        model.refresh()
    run_session(config)
    assert (coordinator.checkins[-1].models, coordinator.checkins[-1].refused) == ({NAME: 8}, UNSET)
    with open_database(config.state, Clock()) as database:
        for number in range(20):
            ModelStore(database, config.population, f"more-{number:02}").put(stored(config))
        ModelStore(database, "tablets", "camera").put(stored(config))
        used, refused = stated_versions(database, config.population)
    assert (list(used), refused) == ([NAME, *(f"more-{number:02}" for number in range(15))], {})
