"""Personal models of plans that `muster export` writes: the parameters that a plan's report goes to, by format."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from device_runtime.backends import FORMATS, open_backend
from device_runtime.errors import PlanRefused
from device_runtime.models.kept import personal_store
from device_runtime.personal import divided
from device_runtime.trainer import InProcess, Job, Limits
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

WIDE = Limits(memory_bytes=10**12, cpu_s=600.0)


def digits():
    """The examples of a few devices, as those of one."""
    shards = [datasets.load("digits").shard(index) for index in range(8)]
    return {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}


def offered(coordinator, model, algorithm, form):
    """The plan of a model, released with its initial parameters, and its graphs of training."""
    plan, blobs = build_plan(model, algorithm, (form,))
    predict, graphs = build_predict(model, (form,))
    plan = structs.replace(plan, predict=predict)
    coordinator.blobs |= {ref.sha256: blob for ref, blob in blobs.items()}
    released(coordinator, 1, params=model.initial, plan=plan, graph=graphs[predict.graphs[form]])
    return plan, {name: blobs[ref] for name, ref in plan.graphs[form].items()}


def kept(config, model, release):
    """The personal parameters (D,) in the state folder."""
    data = personal_store(config, "keyboard").get(release)
    return checkpoint.decode(data, (VectorSpec("params", model.schema.size),))["params"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["logreg", "digits_cnn"])
def test_a_personal_model_is_where_the_report_of_its_plan_goes(coordinator, config, executorch, name, form):
    model, mine = Model(load(name)), digits()
    plan, graphs = offered(coordinator, model, create("fedavg", {"epochs": 5}), form)
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
        offered(coordinator, model, algorithm, "onnx")
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
    offered(coordinator, Model(load("logreg")), create(algorithm), "onnx")
    with taken(owning(config, digits())) as one:
        with pytest.raises(PlanRefused, match=words):
            one.personalise()
        assert not one.personal
