"""Models as `muster export` writes them, released and personal, on a device in both formats."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import nn

from device_runtime.backends import FORMATS, open_backend
from device_runtime.errors import PlanRefused
from device_runtime.models.model import Model as ReleasedModel
from device_runtime.models.version import personal_store
from device_runtime.permission.policy import Policy
from device_runtime.trainer import InProcess, Job, Limits, divided
from export.build import build_plan
from export.model import Model
from export.models import load
from export.predict import build_predict
from export.trial_examples import draw_examples
from fedcore import checkpoint
from fedcore.algorithms import create
from fedcore.algorithms.clipped import Clipped, Clipping
from fedcore.batching import StreamKey
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef
from simulator import datasets
from tests.device_runtime import linear
from tests.device_runtime.executorch import program
from tests.device_runtime.personal import owning, taken
from tests.device_runtime.released import NAME, POLICY, ROWS, released
from tests.sampled import covering


def moved(model):
    """Parameters without zeros, which the module has too."""
    params_D = model.initial + np.random.default_rng(3).normal(0, 0.02, model.initial.shape).astype(np.float32)
    trained = [value for value in model.module.parameters() if value.requires_grad]
    nn.utils.vector_to_parameters(torch.from_numpy(params_D), trained)
    return params_D


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["digits_cnn", pytest.param("char_lstm", marks=pytest.mark.long)])
def test_an_exported_model_predicts_on_a_device_what_torch_does(coordinator, config, executorch, name, form):
    model = Model(load(name))
    predict, graphs = build_predict(model, (form,))
    trained = structs.replace(build_plan(model, create("fedavg"), ())[0], graphs={form: TRAINED}, predict=predict)
    released(coordinator, 1, params=moved(model), plan=trained, graph=graphs[predict.graphs[form]])
    examples = draw_examples(model.spec, 5, np.random.default_rng(5))
    given = {item.name: examples[item.name] for item in model.spec.inputs}
    with torch.no_grad():
        wanted = model.module.eval()(*(torch.from_numpy(values) for values in given.values())).numpy()
    config = replace(config, policy=POLICY, backend=FORMATS[form])
    with ReleasedModel(config, NAME) as one:
        assert one.refresh()
    with ReleasedModel(config, NAME) as one:
        found = one.predict(given)["output"]
        assert found.shape == wanted.shape
        assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


TRAINED = {name: BlobRef.of(name.encode()) for name in ("train.begin", "train.step", "report")}


def test_any_number_of_examples_fits_a_graph_of_four(coordinator, config, executorch):
    arguments = torch.zeros(3), torch.zeros(4, 3)
    blob = program(lambda params, x: x @ params, arguments, ["params", "example.x"], ["output"])
    plan = linear.predicting(blob, linear.plan(fmt="executorch"), batch_size=4, graphs={"executorch": BlobRef.of(blob)})
    params = np.array([1, 2, 3], np.float32)
    released(coordinator, 1, params=params, plan=plan, graph=blob)
    with ReleasedModel(replace(config, policy=POLICY, backend="executorch"), NAME) as model:
        assert model.refresh()
        for count in (1, 3, 4, 5, 11):
            rows = np.tile(ROWS, (4, 1))[:count]
            assert model.predict({"x": rows})["output"].tolist() == [1.0, 2.0, 3.0, *[1.0, 2.0, 3.0] * 3][:count]


def test_unsigned_programs_are_not_asked_for(coordinator, config, executorch):
    with ReleasedModel(replace(config, policy=Policy(), backend="executorch"), NAME) as model:
        with pytest.raises(Exception, match="unsigned_programs") as error:
            model.refresh()
        assert error.value.reason == "policy"
    assert coordinator.calls == []


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
