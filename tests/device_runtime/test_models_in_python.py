"""Models for apps in Python: swaps among threads, files and their durability, deltas, and the command line."""

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
from msgspec import structs

from device_runtime import Device
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.conditions import Clock
from device_runtime.errors import (
    ConfigError,
    InputRefused,
    ModelRefused,
    Unreachable,
)
from device_runtime.models.model import Model
from device_runtime.permission.policy import PerDay, Policy
from device_runtime.session import run_session
from device_runtime.state.database import open_database, read_database
from device_runtime.state.records import ModelStore, kept_blobs, stated_versions
from fedcore import checkpoint
from fedcore.checkpoint import delta_between
from fedcore.plan import BlobRef
from muster.commands.device import parser
from tests.device_runtime import linear
from tests.device_runtime.released import NAME, POLICY, ROWS, released


@pytest.fixture
def owned(config):
    """The device, whose owner names the key of the releases."""
    return replace(config, policy=POLICY)


def stored(config, name=NAME):
    with read_database(config.state) as database:
        return ModelStore(database, config.population, name).get()


def answers(model, rows=ROWS):
    """The version that every answer tells."""
    return model.predict({"x": rows})["output"].tolist()


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


def cached(config):
    """The digests of the blobs in the cache."""
    return {path.name for path in (config.state / "blobs").iterdir() if not path.suffix}


def kept(config):
    with read_database(config.state) as database:
        return kept_blobs(database)


def test_a_name_that_no_model_has_is_a_bad_configuration(owned):
    with pytest.raises(ConfigError, match="'Key/board' is no name of a model"):
        Model(owned, "Key/board")


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
    with Model(owned, NAME) as model, pytest.raises(ModelRefused, match="is not finite"):
        model.refresh()
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


def test_bytes_of_models_count_for_the_day(coordinator, owned):
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
    with read_database(owned.state) as database:
        ((spent,),) = database.execute("SELECT sum(bytes) FROM spent")
    assert spent > 1000


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


def test_a_bare_session_gives_what_a_model_gives(coordinator, owned):
    released(coordinator, 1, params=linear.PARAMS)
    made = {"output": np.empty(3, np.float32)}
    OnnxRuntime().load(linear.predict_graph(), "predict").run({"example.x": ROWS, "params": linear.PARAMS}, made)
    with Model(owned, NAME) as model:
        model.refresh()
        np.testing.assert_array_equal(model.predict({"x": ROWS})["output"], made["output"])


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


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (ROWS[0], "the model takes float32\\[n, 3\\]"),
        (ROWS[:, :2], "is float32\\[3, 2\\]"),
        (ROWS.astype(np.float64), "is float64"),
        (ROWS.tolist(), "of type list"),
    ],
)
def test_an_array_of_another_shape_or_type_is_refused_in_one_line(coordinator, owned, rows, words):
    released(coordinator, 1)
    with Model(owned, NAME) as model:
        model.refresh()
        with pytest.raises(InputRefused, match=words) as error:
            model.predict({"x": rows})
        assert "\n" not in str(error.value)


def test_devices_that_come_for_ever_bring_open_models_up_to_date(coordinator, config):
    device = Device(config.coordinator, config.population, config.examples, config.state)
    released(coordinator, 4)
    with device.model(NAME) as model:
        stop, ended = threading.Event(), []
        device.run_forever(stop, lambda outcome: (ended.append(model.version), stop.set()))
        assert ended == [4]


def test_a_check_in_states_sixteen_models_of_its_population_at_most(coordinator, config, owned):
    released(coordinator, 8)
    with Model(owned, NAME) as model:
        model.refresh()
    with open_database(config.state, Clock()) as database:
        for number in range(20):
            ModelStore(database, config.population, f"more-{number:02}").put(stored(config))
        ModelStore(database, "tablets", "camera").put(stored(config))
        used, refused = stated_versions(database, config.population)
    assert (list(used), refused) == ([NAME, *(f"more-{number:02}" for number in range(15))], {})


def test_counters_are_of_each_model(coordinator, config):
    released(coordinator, 9)
    with Model(config, NAME) as model:
        model.refresh()
    coordinator.models["camera"] = released(coordinator, 3, name="camera")
    with Model(config, "camera") as model:
        assert (model.refresh(), model.version) == (True, 3)
