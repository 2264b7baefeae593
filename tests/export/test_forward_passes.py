"""Graphs of forward passes: what torch measures in eval mode, without a gradient, in every format."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from export.build import build_plan, export_bundle, verify_bundle
from export.capture import Received, capture_begin, capture_step
from export.errors import ParityFailed
from export.model import MeasureOracle, Model, cross_entropy
from export.models import load
from export.parity import certify
from export.trial import TOLERANCE
from fedcore.algorithms import create
from fedcore.algorithms.facts import for_model
from fedcore.checkpoint import specs_of
from fedcore.errors import InvalidSetting
from fedcore.params import VectorSpec
from fedcore.plan import NOISE, BlobRef, Field
from tests.export import models
from tests.sampled import sampled

EVALUATIONS = ("evaluate", "compare", "personalisation")
SMALL = [("transformer", ((9,), 7)), ("char_lstm", ((9,), 7))]


def captured(model, name="evaluate"):
    """The step graph of the first pass."""
    algorithm = for_model(create(name), model.metrics[1:], model.schema)
    state = algorithm.init(torch.from_numpy(model.initial))
    received = Received([VectorSpec(key, vector.numel()) for key, vector in state.items()], {})
    stage = algorithm.passes[0]
    return capture_step(model, stage, received, capture_begin(stage, received).specs)


@pytest.mark.parametrize(
    ("name", "algorithm"), sampled(product(["logreg", "digits_cnn"], EVALUATIONS), [("logreg", "personalisation")])
)
def test_evaluations_agree_with_torch_on_both_formats(name, algorithm, executorch, tmp_path):
    """Every run has the one that trains between two forward passes; test_export.py has the graphs of all."""
    bundle = export_bundle(Model(load(name)), create(algorithm), tmp_path, targets=("onnx", "executorch"))
    for evidence in bundle.certificate.formats.values():
        assert evidence.worst <= evidence.tolerance == TOLERANCE
    assert verify_bundle(bundle).worst <= TOLERANCE


@pytest.mark.parametrize(("name", "sizes"), sampled([*SMALL, ("resnet18_gn", ())], SMALL[1:]))
def test_layers_with_a_way_of_their_own_in_eval_mode_agree_with_torch(name, sizes):
    """Every run has small models with such layers; a large one is long."""
    model = Model(load(name, *sizes))
    algorithm = for_model(create("evaluate"), model.metrics[1:], model.schema)
    assert certify(model, algorithm, *build_plan(model, algorithm)).worst <= TOLERANCE


@pytest.mark.parametrize(("name", "sizes"), sampled([("digits_cnn", ()), *SMALL[1:]], [("digits_cnn", ())]))
def test_a_forward_graph_has_no_operator_of_a_gradient_and_is_smaller(name, sizes):
    model = Model(load(name, *sizes))
    targets = [str(node.target) for node in captured(model).module.graph.nodes]
    assert not [target for target in targets if "backward" in target]
    trained = captured_training(model)
    assert len(targets) < 0.75 * len(trained.module.graph.nodes)


def captured_training(model):
    stage = create("fedavg").passes[0]
    received = Received([VectorSpec("params", model.schema.size)], {})
    return capture_step(model, stage, received, capture_begin(stage, received).specs)


def test_a_forward_pass_has_dropout_off_and_draws_nothing(tmp_path):
    model = Model(models.digits_dropout())
    assert NOISE in [port.name for port in captured_training(model).inputs]
    assert NOISE not in [port.name for port in captured(model).inputs]
    bundle = export_bundle(model, create("personalisation"), tmp_path)
    assert [stage.noise for stage in bundle.plan.passes] == [False, True, False]
    assert bundle.certificate.worst <= TOLERANCE


def test_a_graph_of_the_model_in_training_mode_does_not_pass(monkeypatch):
    """A parity test that would not see a wrong mode proves nothing."""
    scaled = Model(models.spec(Scaled, inputs=(Field("x", "float32", (4,)),)))
    wrong = Model.evaluating

    def training(self):
        other = wrong(self)
        other.module.train()
        return other

    algorithm = for_model(create("evaluate"), scaled.metrics[1:], scaled.schema)
    monkeypatch.setattr("export.capture.Model.evaluating", training)
    plan, graphs = build_plan(scaled, algorithm)
    monkeypatch.undo()
    with pytest.raises(ParityFailed, match=r"measure\.step is"):
        certify(scaled, algorithm, plan, graphs)


class Scaled(nn.Module):
    """Gives other outputs in eval mode, as layers with statistics do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x):
        return self.linear(x) * (1.0 if self.training else 2.0)


def test_an_evaluating_model_leaves_the_one_that_trains_as_it_is():
    model = Model(models.digits_dropout())
    assert model.noisy
    evaluating = model.evaluating()
    assert (model.module.training, evaluating.module.training) == (True, False)
    assert (model.noisy, evaluating.noisy) == (True, False)
    batch = {
        "x": torch.randn(4, *model.spec.inputs[0].shape),
        "y": torch.zeros(4, dtype=torch.int64),
    }
    mask, params = torch.tensor([1.0, 1, 0, 1]), torch.from_numpy(model.initial)
    sums = MeasureOracle(evaluating, batch, mask)(params)
    module = evaluating.module
    nn.utils.vector_to_parameters(params, module.parameters())
    loss = cross_entropy(module(batch["x"]), batch["y"])
    torch.testing.assert_close(sums[:2], torch.stack([mask.sum(), (loss * mask).sum()]))
    assert not sums.requires_grad


def test_the_bundle_spells_out_the_ranges_of_the_models_metrics(tmp_path):
    bundle = export_bundle(Model(load("logreg")), create("evaluate"), tmp_path)
    assert bundle.manifest.algorithm.settings["metrics"] == "loss=0..10,accuracy=0..1"
    assert specs_of({"low": np.zeros(2)})[0] in bundle.plan.broadcast
    assert isinstance(bundle.manifest.state, BlobRef)


def test_ranges_for_other_metrics_than_the_models_are_refused(tmp_path):
    with pytest.raises(InvalidSetting, match="the model has no metric 'recall'; there are loss, accuracy"):
        export_bundle(Model(load("logreg")), create("evaluate", {"metrics": "loss=0..1,recall=0..1"}), tmp_path)
