"""A predict graph gives what torch gives in eval mode, for each example alone; what cannot be one is refused."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from device_runtime.backends import BACKENDS, FORMATS
from export.build import export_bundle, verify_bundle
from export.errors import ImpureModel, InvalidModel, ParityFailed, UnsupportedOperator
from export.model import Model
from export.models import MODELS, load
from export.predict import FIXED_BATCH, build_predict, predict_parity
from export.trial_examples import draw_examples
from fedcore.algorithms import create
from fedcore.bundle import Bundle
from fedcore.plan import EXAMPLE, FROZEN, PARAMS, PREDICT, BlobRef, Field, prefixed
from tests.export import models
from tests.sampled import sampled

CASES = list(product(MODELS, FORMATS))
LARGE = ("mobilenetv2_gn", "resnet18_gn", "word_lstm")
SAMPLE = [(name, form) for name, form in CASES if name not in LARGE and (form == "onnx" or name == "digits_cnn")]
X, TOKENS = Field("x", "float32", (3, 7)), Field("t", "int64", (4,), high=9)


def own(forward, inputs=(X, TOKENS)):
    """A model of one layer whose forward is a function of it and the inputs."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(7, 5)

        def forward(self, *given):
            return forward(self.layer, *given)

    return Model(models.spec(Own, inputs=inputs))


def loaded(predict, graphs):
    """The graphs on their runtimes, by format."""
    return {form: BACKENDS[FORMATS[form]]().load(graphs[ref], PREDICT) for form, ref in predict.graphs.items()}


def outputs_of(graph, predict, model, params_D, examples):
    """What a graph gives for examples."""
    count = len(next(iter(examples.values())))
    outputs = {one.name: np.empty((count, *one.shape), one.dtype) for one in predict.outputs}
    inputs = {PARAMS: params_D} | prefixed(FROZEN, model.frozen_vectors) | prefixed(EXAMPLE, examples)
    graph.run(inputs, outputs)
    return outputs


def moved(model):
    """Parameters without zeros, which the module has too."""
    params_D = model.initial + np.random.default_rng(3).normal(0, 0.02, model.initial.shape).astype(np.float32)
    trained = [value for value in model.module.parameters() if value.requires_grad]
    nn.utils.vector_to_parameters(torch.from_numpy(params_D), trained)
    return params_D


def in_torch(model, examples):
    """The outputs of the module itself in eval mode."""
    with torch.no_grad():
        return model.module.eval()(*(torch.from_numpy(examples[item.name]) for item in model.spec.inputs)).numpy()


def drawn(model, count):
    examples = draw_examples(model.spec, count, np.random.default_rng(count))
    return {item.name: examples[item.name] for item in model.spec.inputs}


@pytest.mark.parametrize(("name", "form"), sampled(CASES, SAMPLE))
def test_every_built_in_model_predicts_what_torch_does(name, form, executorch):
    """Every run has all but large models in ONNX, and a small one in ExecuTorch."""
    model = Model(load(name))
    predict, graphs = build_predict(model, (form,))
    graph, params_D = loaded(predict, graphs)[form], moved(model)
    for count in (1, 3, 17) if form == "onnx" else (FIXED_BATCH,) * 3:
        examples = drawn(model, count)
        expected = in_torch(model, examples)
        found = outputs_of(graph, predict, model, params_D, examples)["output"]
        assert found.shape == expected.shape
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("make", [models.digits_dropout, models.transfer, models.encoder])
def test_a_users_own_model_predicts_in_both_formats(make, executorch):
    model = Model(make())
    predict, graphs = build_predict(model, tuple(FORMATS))
    fixed = {"onnx": False, "executorch": True}
    for parity in predict_parity(model, predict, loaded(predict, graphs), fixed=fixed).values():
        assert (parity.graph, parity.steps) == (PREDICT, 3)
        assert parity.l2 <= 1e-5


def test_nothing_is_dropped_and_training_still_drops():
    model = Model(models.dropout())
    predict, graphs = build_predict(model, ("onnx",))
    examples, params_D = drawn(model, 3), moved(model)
    found = outputs_of(loaded(predict, graphs)["onnx"], predict, model, params_D, examples)["output"]
    assert model.module.training  # the export changed a copy
    np.testing.assert_allclose(found, in_torch(model, examples), 1e-5, 1e-6)
    torch.manual_seed(0)
    with torch.no_grad():
        dropped = model.module.train()(torch.from_numpy(examples["x"])).numpy()
    assert np.abs(dropped - found).max() > 0.01


@pytest.mark.parametrize(
    "mix",
    [
        lambda layer, x, t: layer(x[:, 0]) - layer(x[:, 0]).mean(0),
        lambda layer, x, t: layer(x[:, 0]) * x.amax(),
        lambda layer, x, t: layer(x[:, 0]) if layer.training else layer(x[:, 0]).roll(1, 0),
    ],
)
def test_a_model_whose_examples_influence_each_other_is_refused(mix):
    with pytest.raises(ImpureModel, match="gives an example another output in eval mode when other examples"):
        build_predict(own(mix), ())


@pytest.mark.parametrize(
    "divide",
    [
        lambda t: t // (t + 1),
        lambda t: t % (t + 1),
        lambda t: torch.div(t, t + 1, rounding_mode="floor"),
        lambda t: t // -1,
        lambda t: t.int() % torch.tensor([3, -1, 1, 2], dtype=torch.int32),
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_integers_divided_by_data_are_refused_in_a_predict_graph(divide, form):
    model = own(lambda layer, x, t: layer(x[:, 0]) + divide(t).sum(1, keepdim=True))
    with pytest.raises(UnsupportedOperator, match="divides integers by data"):
        build_predict(model, (form,))


def test_floats_and_constants_may_divide(executorch):
    def forward(layer, x, t):
        shares = x[:, 0].exp() / x[:, 0].exp().sum(1, keepdim=True) / 3
        quotient = layer(shares).abs().log1p().div(t.sum(1, keepdim=True) + 1)
        return quotient + t[:, :1] % 3 + t[:, :1] // torch.tensor(-2)

    model = own(forward)
    predict, graphs = build_predict(model, tuple(FORMATS))
    predict_parity(model, predict, loaded(predict, graphs), fixed={"onnx": False, "executorch": True})


def test_several_outputs_have_names():
    several = own(lambda layer, x, t: (layer(x[:, 0]), layer(x[:, 1]).argmax(1)))
    named = own(lambda layer, x, t: {"logits": layer(x[:, 0]), "words": t * 2})
    for model, names in ((several, ["output.0", "output.1"]), (named, ["output.logits", "output.words"])):
        predict, graphs = build_predict(model, ("onnx",))
        assert [one.name for one in predict.outputs] == names
        assert [one.dtype for one in predict.outputs] == ["float32", "int64"]
        predict_parity(model, predict, loaded(predict, graphs), fixed={"onnx": False})


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda layer, x, t: (layer(x[:, 0]), None), "gives output.1 as NoneType, not as a tensor"),
        (lambda layer, x, t: layer(x[:, 0]) > 0, "gives output as bool"),
        (lambda layer, x, t: layer(x[:, 0]).T, "with the examples on the first axis"),
        (lambda layer, x, t: layer(x[:, 0]).sum(), "with the examples on the first axis"),
        (lambda layer, x, t: layer(x[:, 0].squeeze()).unflatten(0, (len(x), 1)), "does not run in eval mode"),
    ],
)
def test_outputs_that_are_none_for_each_example_are_refused(forward, words):
    with pytest.raises(InvalidModel, match=words):
        build_predict(own(forward), ())


def test_a_model_that_cannot_predict_is_exported_and_it_is_said_why(tmp_path):
    bundle = export_bundle(Model(models.spec(Halves, first_cross_entropy, metrics={})), create("fedavg"), tmp_path)
    assert bundle.plan.predict is None
    assert bundle.manifest.no_predict == "test gives output.1 as NoneType, not as a tensor"
    assert PREDICT not in {parity.graph for parity in bundle.certificate.formats["onnx"].parity}


def first_cross_entropy(outputs, label):
    return nn.functional.cross_entropy(outputs[0], label, reduction="none")


class Halves(nn.Module):
    """Gives nothing beside its outputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(126, 5)

    def forward(self, x):
        return self.layer(x.flatten(1)), None


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return export_bundle(Model(load("logreg")), create("fedavg"), tmp_path_factory.mktemp("logreg"))


def altered(bundle, folder, predict, *blobs):
    """The bundle with another predict graph in its plan."""
    data = replace(bundle.plan, predict=predict).encode()
    kept = [blob for _, blob in bundle.blobs()]
    return Bundle.write(folder, replace(bundle.manifest, plan=BlobRef.of(data)), [data, *kept, *blobs])


def test_the_certificate_has_the_predict_graph_and_the_plan_its_digest(bundle):
    evidence, ref = bundle.certificate.formats["onnx"], bundle.plan.predict.graphs["onnx"]
    (parity,) = (parity for parity in evidence.parity if parity.graph == PREDICT)
    assert parity.l2 <= 1e-5
    assert parity.float64 > 0
    assert ref.sha256 in bundle.plan.encode().decode()
    assert bundle.read(ref)
    assert evidence.footprint.graph_bytes == sum(one.size for one in bundle.plan.graphs["onnx"].values())
    assert [one.graph for one in verify_bundle(bundle).formats["onnx"].parity][-1] == PREDICT


def test_a_bundle_without_a_predict_graph_is_verified(bundle, tmp_path):
    certificate = json.loads(bundle.read(bundle.manifest.certificate))
    evidence = certificate["formats"]["onnx"]
    evidence["parity"] = [one for one in evidence["parity"] if one["graph"] != PREDICT]
    plan, data = replace(bundle.plan, predict=None).encode(), json.dumps(certificate).encode()
    manifest = replace(bundle.manifest, plan=BlobRef.of(plan), certificate=BlobRef.of(data))
    older = Bundle.write(tmp_path, manifest, [plan, data, *(blob for _, blob in bundle.blobs())])
    assert PREDICT not in {one.graph for one in verify_bundle(older).formats["onnx"].parity}


def test_another_models_predict_graph_is_found_out(bundle, tmp_path):
    field = (Field("x", "float32", (1, 8, 8)),)
    predict, blobs = build_predict(own(lambda layer, x: layer(x.flatten(1)[:, :7]).repeat(1, 2), field), ("onnx",))
    wrong = replace(bundle.plan.predict, graphs=predict.graphs)
    with pytest.raises(ParityFailed, match="cannot run an exported graph"):
        verify_bundle(altered(bundle, tmp_path, wrong, *blobs.values()))


def test_a_predict_graph_of_other_outputs_is_found_out(bundle, tmp_path):
    wrong = replace(bundle.plan.predict, outputs=(Field("output", "float32", (11,)),))
    with pytest.raises(ParityFailed, match="predicts otherwise than model logreg"):
        verify_bundle(altered(bundle, tmp_path, wrong))


def test_a_predict_graph_that_is_slightly_wrong_is_found_out():
    spec = load("logreg")

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = spec.make()

        def forward(self, x):
            return self.inner(x) * 1.0001

    scaled = models.spec(Scaled, inputs=spec.inputs, label=spec.label)
    predict, graphs = build_predict(Model(scaled), ("onnx",))
    with pytest.raises(ParityFailed, match="from torch in eval mode, allowed is 1e-05"):
        predict_parity(Model(spec), predict, loaded(predict, graphs), fixed={"onnx": False})
