"""Personal models of plans that `muster export` writes: the parameters that a plan's report goes to, by format."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from device_runtime.backends import FORMATS, open_backend
from device_runtime.errors import PlanRefused
from device_runtime.models.version import personal_store
from device_runtime.trainer import InProcess, Job, Limits, divided
from export.build import build_plan
from export.model import Model
from export.models import load
from export.predict import build_predict
from fedcore import checkpoint
from fedcore.algorithms import create
from fedcore.algorithms.clipped import Clipped, Clipping
from fedcore.batching import StreamKey
from fedcore.params import VectorSpec
from simulator import datasets
from tests.device_runtime.personal import owning, taken
from tests.device_runtime.released import released
from tests.sampled import covering

WIDE = Limits(memory_bytes=10**12, cpu_s=600.0)


def digits():
    """The examples of a few devices, as those of one."""
    shards = [datasets.load("digits").shard(index) for index in range(8)]
    return {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}


def predicting(model, algorithm, form):
    """A plan of a model that predicts, and its blobs."""
    plan, blobs = build_plan(model, algorithm, (form,))
    predict, graphs = build_predict(model, (form,))
    return structs.replace(plan, predict=predict), blobs | graphs


def offered(coordinator, params, plan, blobs, form="onnx"):
    """Release a plan's model with these parameters (D,); its graphs of training."""
    coordinator.blobs |= {ref.sha256: blob for ref, blob in blobs.items()}
    released(coordinator, 1, params=params, plan=plan, graph=blobs[plan.predict.graphs[form]])
    return {name: blobs[ref] for name, ref in plan.graphs[form].items()}


def kept(config, model, release):
    """The personal parameters (D,) in the state folder."""
    data = personal_store(config, "keyboard").get(release)
    return checkpoint.decode(data, (VectorSpec("params", model.schema.size),))["params"]


@pytest.mark.parametrize(("form", "name"), covering(FORMATS, ["digits_cnn", "logreg"]))
def test_a_personal_model_is_where_the_report_of_its_plan_goes(coordinator, config, executorch, name, form):
    model, mine = Model(load(name)), digits()
    plan, blobs = predicting(model, create("fedavg", {"epochs": 5}), form)
    graphs = offered(coordinator, model.initial, plan, blobs, form)
    config = replace(owning(config, mine), backend=FORMATS[form])
    with taken(config) as one:
        before = one.predict({"x": mine["x"]})["output"].argmax(axis=1)
        outcome = one.personalise()
        after = one.predict({"x": mine["x"]})["output"].argmax(axis=1)
    train, _ = divided(plan.examples, mine)
    job = Job(plan, graphs, {"params": model.initial}, train, StreamKey(0, 0, 0))
    delta = InProcess(open_backend(config.backend)).train(job, WIDE, lambda: True).values[: model.schema.size]
    wanted = model.initial + delta
    np.testing.assert_allclose(kept(config, model, coordinator.models["keyboard"]), wanted, atol=1e-6)
    assert (outcome.kept, outcome.after < outcome.before) == (True, True)
    assert (after == mine["y"]).mean() > (before == mine["y"]).mean() + 0.1


def test_the_bound_on_reports_does_not_bound_a_personal_model(coordinator, config):
    model, mine = Model(load("logreg")), digits()
    settings = {"epochs": 5, "weighting": "uniform"}
    made = []
    for algorithm in (create("fedavg", settings), Clipped(create("fedavg", settings), Clipping(clip_norm=1e-3))):
        offered(coordinator, model.initial, *predicting(model, algorithm, "onnx"))
        owned = owning(replace(config, state=config.state / str(len(made))), mine)
        with taken(owned) as one:
            assert one.personalise().kept
        made.append(kept(owned, model, coordinator.models["keyboard"]))
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("mimelite", r"'params' alone, which .*broadcast\.m"),
        ("mime", "two trips"),
        ("fedsgd", "makes a local model"),
    ],
)
def test_algorithms_whose_steps_need_the_server_are_refused(coordinator, config, algorithm, words):
    model = Model(load("logreg"))
    offered(coordinator, model.initial, *predicting(model, create(algorithm), "onnx"))
    with taken(owning(config, digits())) as one:
        with pytest.raises(PlanRefused, match=words):
            one.personalise()
        assert not one.personal
