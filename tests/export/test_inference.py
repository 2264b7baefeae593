"""An inference model gives what torch gives in eval mode, with no graph input but the fields of an example."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from export.build import build_plan
from export.errors import ParityFailed, UnknownFormat, UnknownModel, UnsupportedOperator
from export.inference.int8 import quantised
from export.inference.making import inference_model
from export.inference.trained import Trained
from export.model import Model
from export.models import load
from export.predict import build_predict
from fedcore.algorithms import create
from fedcore.checkpoint import encode_frozen
from fedcore.errors import PlanError, SchemaError
from fedcore.plan import BlobRef, Field
from tests.export import models
from tests.export.test_predict import drawn, in_torch, moved

HAND = {name: BlobRef.of(b"") for name in ("train.begin", "train.step", "report")}


def trained(model, params):
    """The model with these parameters; its plan has no training graphs to read."""
    predict, graphs = build_predict(model, ("onnx",))
    plan = replace(build_plan(model, create("fedavg"), ())[0], graphs={"onnx": HAND}, predict=predict)
    if plan.frozen is not None:
        graphs[plan.frozen.blob] = encode_frozen(model.frozen_vectors)
    return Trained(plan, params, graphs.__getitem__)


def clashing():
    """Fields and tensors with the names of values in a graph, and of each other."""

    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.v6, self.x = nn.Parameter(torch.ones(7)), nn.Linear(7, 5)
            self.c1 = nn.Parameter(torch.ones(5))

        def forward(self, v8, v6):
            return (self.x(v8 * self.v6) + v6.reshape(-1, 1, 1) / 3).mean(1) * self.c1

    fields = (Field("v8", "float32", (2, 7)), Field("v6", "float32"))
    return models.spec(Clash, inputs=fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: load("least_squares"),
        lambda: load("digits_cnn"),
        lambda: load("char_lstm"),
        pytest.param(lambda: load("transformer"), marks=pytest.mark.long),
        models.transfer,
        models.digits_in_8_bits,
        clashing,
    ],
)
def test_plain_onnx_gives_what_torch_does_at_any_batch_size(make):
    model = Model(make())
    made = inference_model(trained(model, moved(model))).data
    graph = onnx.load_model_from_string(made).graph
    assert [item.name for item in graph.input] == [item.name for item in model.spec.inputs]
    named = {item.name.removesuffix(".2") for item in graph.initializer}
    assert {spec.name for spec in model.schema.tensors} <= named
    session = onnxruntime.InferenceSession(made)
    for count in (1, 3, 17):
        examples = drawn(model, count)
        (found,), expected = session.run(None, examples), in_torch(model, examples)
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.long
def test_int8_takes_a_quarter_and_its_cost_is_measured():
    model = Model(load("char_lstm"))
    work = trained(model, moved(model))
    whole, small = inference_model(work), inference_model(work, int8=True)
    assert len(small.data) < 0.3 * len(whole.data)
    assert small.cost.examples == 256
    assert 0 < small.cost.largest < 0.1 * small.cost.largest_output
    assert small.cost.accuracy is None
    labels = onnxruntime.InferenceSession(whole.data).run(None, drawn(model, 20))[0].argmax(-1)
    labelled = inference_model(work, int8=True, examples=drawn(model, 20) | {"y": labels}).cost
    assert labelled.accuracy[0] == 1
    assert 0.5 < labelled.accuracy[1] <= 1


def test_a_model_without_products_by_weights_is_not_quantised():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return x * self.scale

    model = Model(models.spec(Scale, inputs=(Field("x", "float32", (5,)),)))
    with pytest.raises(UnsupportedOperator, match="leave out int8"):
        quantised(inference_model(trained(model, model.initial)).data)


def test_a_model_of_torch_takes_any_batch_and_draws_nothing(tmp_path):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(7, 5)

        def forward(self, x):
            return self.layer(x + torch.randn_like(x))

    spec = models.spec(Noisy, inputs=(Field("x", "float32", (7,)),))
    model = Model(spec)
    params, file = moved(model), tmp_path / "model.pt2"
    file.write_bytes(inference_model(trained(model, params), "torch", source=spec).data)
    program = torch.export.load(file).module()
    for count in (1, 3, 17):
        x = torch.from_numpy(drawn(model, count)["x"])
        torch.testing.assert_close(program(x), model.module.layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("to", "int8", "error", "words"),
    [
        ("tflite", False, UnknownFormat, "no inference model is called 'tflite'"),
        ("torch", True, UnknownFormat, "so for onnx and not for torch"),
        ("torch", False, UnknownModel, "name it with --model"),
        ("executorch", False, UnknownModel, "name it with --model"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(to, int8, error, words):
    model = Model(load("logreg"))
    with pytest.raises(error, match=words):
        inference_model(trained(model, model.initial), to, int8=int8)


def test_another_models_source_is_refused_before_it_takes_memory():
    model = Model(load("logreg"))
    with pytest.raises(SchemaError, match="is of another model than mlp"):
        inference_model(trained(model, model.initial), "torch", source="mlp")


@pytest.mark.parametrize("last", [nn.Tanh(), nn.Unflatten(1, (5, 1))])
def test_another_models_source_is_refused_though_it_has_the_same_tensors(last):
    plain, other = (
        models.spec(lambda more=more: nn.Sequential(nn.Flatten(), nn.Linear(126, 5), *more)) for more in ([], [last])
    )
    work = trained(Model(plain), Model(plain).initial)
    assert inference_model(work, "torch", source=plain).data
    with pytest.raises(SchemaError, match="is of another model than"):
        inference_model(work, "torch", source=other)


def test_a_plan_without_a_predict_graph_says_what_to_do():
    model = Model(load("logreg"))
    work = trained(model, model.initial)
    without = Trained(replace(work.plan, predict=None), work.params, work.read)
    with pytest.raises(PlanError, match="export it again"):
        inference_model(without)
    refused = Trained(without.plan, work.params, work.read, "its outputs mix examples")
    with pytest.raises(PlanError, match="has no predict graph: its outputs mix examples"):
        inference_model(refused)


def test_a_file_that_would_be_wrong_is_not_written(monkeypatch):
    model = Model(load("logreg"))
    work = trained(model, moved(model))
    monkeypatch.setattr(Trained, "outputs", lambda self, examples: {"output": 1.001 * in_torch(model, examples)})
    with pytest.raises(ParityFailed, match="the ONNX model is"):
        inference_model(work)
