"""Every graph computes what torch computes; what cannot be exported is refused by name."""

import dataclasses
import functools
import shutil
import subprocess
import sys
from itertools import product

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from device_runtime.backends import BACKENDS, FORMATS
from export.build import build_plan, export_bundle, verify_bundle
from export.capture import Port, Received, capture, capture_step
from export.convolution import convolution, convolution_backward
from export.decompositions import TABLE, max_pool2d_backward
from export.errors import (
    DynamicControlFlow,
    ImpureModel,
    InvalidModel,
    ParityFailed,
    UnknownModel,
    UnsupportedModule,
    UnsupportedOperator,
)
from export.model import Model, ModelSpec, accuracy, cross_entropy
from export.models import load
from export.onnx import to_onnx
from export.parity import certify
from export.trial import TOLERANCE, Trial
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.algorithm import keeps_client_state
from fedcore.algorithms.facts import for_model
from fedcore.algorithms.local_training import PartlyLocal
from fedcore.algorithms.question import QUESTION
from fedcore.bundle import Bundle
from fedcore.errors import DigestMismatch, PlanError
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef, Field
from fedcore.validation import own_name
from tests.export import impure, models
from tests.sampled import covering, sampled

EMBEDDING = TABLE[torch.ops.aten.embedding_dense_backward.default]
# Those that export in seconds, with every algorithm; the others follow in test_golden.py.
QUICK = ("logreg", "mlp", "digits_cnn")
SETTINGS = [
    *((name, {}) for name in ("fedavg", "fedadam", "mimelite")),
    ("mimelite", {"optimizer": "adam", "client_lr": 0.01}),
]
# Every graph that some algorithm can have; server optimizers share FedAvg's.
OWN_GRAPHS = [
    *((name, {}) for name, one in ALGORITHMS.items() if one.family != QUESTION),  # whose model is its own
    ("scaffold", {"option": "I"}),
    ("fedpa", {"samples": 2, "burn_in_rounds": 2}),
    ("fedavg", {"client_optimizer": "momentum"}),
    ("fedavg", {"client_optimizer": "adam", "client_lr": 0.01}),
    ("fednova", {"mu": 0.1, "client_momentum": 0.5}),
    ("mimelite", {"optimizer": "adagrad", "client_lr": 0.01}),
]


@pytest.fixture(scope="module")
def engine_mb():
    """The peak memory of a process that loads ONNX Runtime and does nothing, in 2^20 bytes."""
    code = "import numpy, onnxruntime; from device_runtime.capabilities import peak_rss_mb; print(peak_rss_mb())"
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)


@pytest.fixture
def as_for_users(measured_alone, monkeypatch):
    """Footprints are measured as they are for users, in a process that is started for each."""
    monkeypatch.setattr("export.parity.measured_alone", measured_alone)


def parities(certificate):
    return {name: evidence.parity for name, evidence in certificate.formats.items()}


@pytest.mark.parametrize(("name", "setting"), covering(QUICK, SETTINGS))
@pytest.mark.usefixtures("as_for_users")
def test_every_model_and_algorithm_agree_with_torch_on_onnx_runtime(name, setting, engine_mb, tmp_path):
    algorithm, settings = setting
    bundle = export_bundle(Model(load(name)), create(algorithm, settings), tmp_path)
    assert bundle.certificate.worst <= TOLERANCE
    evidence = bundle.certificate.formats["onnx"]
    assert {parity.graph for parity in evidence.parity} >= {"train.step", "report"}
    assert evidence.footprint.graph_bytes == sum(ref.size for ref in bundle.plan.graphs["onnx"].values())
    assert evidence.footprint.step_cpu_ms > 0
    assert engine_mb < evidence.footprint.peak_rss_mb < 2 * engine_mb


def test_a_small_model_without_a_loop_has_a_graph_of_many_steps():
    graphs = {}
    for name, model in (
        ("small", load("digits_cnn")),
        ("loop", models.recurrent()),
        ("large", load("mlp", (1, 28, 28), 62)),
    ):
        plan, _ = build_plan(Model(model), create("fedavg"), ("onnx",))
        graphs[name] = set(plan.graphs["onnx"]) - {"train.begin", "report"}
    assert graphs == {"small": {"train.steps"}, "loop": {"train.step"}, "large": {"train.step"}}


def test_frozen_vectors_count_towards_the_size_of_a_small_model(monkeypatch):
    plan, _ = build_plan(model := Model(models.transfer()), create("fedavg"), ("onnx",))
    assert "train.steps" in plan.graphs["onnx"]
    monkeypatch.setattr("export.build.FEW_VALUES", 2 * model.initial.size)
    plan, _ = build_plan(model, create("fedavg"), ("onnx",))
    assert "train.step" in plan.graphs["onnx"]


def local_for(name, pattern):
    """The pattern for an algorithm that keeps parameters on clients; none for others."""
    return pattern if isinstance(create(name), PartlyLocal) else ""


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if keeps_client_state(algorithm())])
def test_a_plan_names_what_devices_keep_and_certifies_its_graphs(name, tmp_path):
    model = Model(load("logreg").with_local(local_for(name, "*.bias")))
    algorithm = for_model(create(name), model.metrics[1:], model.schema)
    bundle = export_bundle(model, create(name), tmp_path, "logreg")
    first = algorithm.init_client(model.initial)
    assert {spec.name: spec.size for spec in bundle.plan.kept} == {name: vector.size for name, vector in first.items()}
    certified = {parity.graph: parity.l2 for parity in bundle.certificate.formats["onnx"].parity}
    assert certified["kept.first"] == 0
    assert 0 < certified["kept.next"] < TOLERANCE
    assert verify_bundle(Bundle(tmp_path)).formats["onnx"].worst < TOLERANCE
    with pytest.raises(PlanError, match=r"has graphs .*'kept.first', 'kept.next', 'report'"):
        replace(bundle.plan, kept=())
    with pytest.raises(PlanError, match="as vectors that devices receive and keep; it needs one trip"):
        replace(bundle.plan, kept=(VectorSpec("params", 3),))


# Their devices run FedAvg's functions: they differ in what the coordinator does.
SERVER_OPTIMIZERS = {"fedadam", "fedbuff", "fedavgm", "fedadagrad", "fedyogi", "fedlars", "fedlamb"}


@pytest.mark.parametrize(
    ("form", "algorithm", "settings"),
    sampled(
        ((form, *one) for form in FORMATS for one in OWN_GRAPHS),
        (("onnx", *one) for one in OWN_GRAPHS if one[0] not in SERVER_OPTIMIZERS),
    ),
)
def test_graphs_of_every_algorithm_agree_with_torch(form, algorithm, settings, request):
    """Every run has those of ONNX that differ; what ExecuTorch makes of operators, test_executorch.py has."""
    if form == "executorch":
        request.getfixturevalue("executorch")
    spec = impure.tempered().with_local(local_for(algorithm, "temperature"))  # of a dense layer and a scalar
    model, chosen = Model(spec), create(algorithm, settings)
    plan, graphs = build_plan(model, chosen, (form,))
    backend = BACKENDS[FORMATS[form]]()
    for index, trip in enumerate(plan.trips):
        work = Trial.draw(model, chosen, trip_index=index)
        found = work.exported(trip, {part: backend.load(graphs[ref], part) for part, ref in trip.graphs[form].items()})
        assert max(work.distances(found, work.reference()).values()) <= TOLERANCE


USERS = [
    models.strided,
    models.residual,
    models.regression,
    models.positions,
    models.grouped,
    models.separable,
    models.gated_cell,
    models.recurrent,
    models.encoder,
    models.dropout,
    models.fixed_to_float32,
    models.weighted_loss,
    models.everything_dropped,
    models.transfer,
    impure.tied,
    impure.tempered,
]


# Those that are trained with MimeLite, whose trace has a pass more: plain numbers, noise, and frozen vectors.
OF_TWO_PASSES = {models.regression, models.dropout, models.transfer}


# Promises have their layers too, each in a model of its own.
LARGE = {models.grouped, models.separable, models.gated_cell, models.recurrent}
IN_EXECUTORCH = {*OF_TWO_PASSES, impure.tied}
OF_USERS = list(product(USERS, FORMATS))


@pytest.mark.parametrize(
    ("make", "form"),
    sampled(OF_USERS, [(m, form) for m, form in OF_USERS if m not in LARGE and (form == "onnx" or m in IN_EXECUTORCH)]),
)
def test_a_users_own_model_agrees_with_torch(make, form, request):
    """Every run has as ExecuTorch what plans say of a model; layers of the others test_executorch.py has."""
    if form == "executorch":
        request.getfixturevalue("executorch")
    model, algorithm = Model(make()), create("mimelite" if make in OF_TWO_PASSES else "fedavg")
    plan, graphs = build_plan(model, algorithm, (form,))
    work, backend = Trial.draw(model, algorithm), BACKENDS[FORMATS[form]]()
    found = work.exported(plan, {part: backend.load(graphs[ref], part) for part, ref in plan.graphs[form].items()})
    assert max(work.distances(found, work.reference()).values()) <= TOLERANCE


def test_a_binary_classifier_agrees_with_torch(tmp_path):
    loss = functools.partial(torch.nn.functional.binary_cross_entropy_with_logits, reduction="none")
    label = Field("y", "float32")
    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(126, 1), torch.nn.Flatten(0))
    export_bundle(Model(models.spec(lambda: head, loss, label=label, metrics={})), create("mimelite"), tmp_path)


def test_graphs_are_plain_onnx_without_weights_or_training_operators():
    model = Model(load("digits_cnn"))
    _, graphs = build_plan(model, create("mimelite"))
    for graph in graphs.values():
        proto = onnx.load_model_from_string(graph)
        assert [(item.domain, item.version) for item in proto.opset_import] == [("", 18)]
        assert all(node.domain == "" for node in proto.graph.node)
        assert sum(np.prod(tensor.dims) for tensor in proto.graph.initializer) < model.schema.size / 10
        assert not any("Random" in node.op_type or "Dropout" in node.op_type for node in proto.graph.node)


def test_an_lstm_is_a_loop_whose_graph_does_not_grow_with_its_length():
    def operators(length):
        graphs = build_plan(Model(load("char_lstm", (length,), 11)), create("fedavg"))[1]
        step = onnx.load_model_from_string(max(graphs.values(), key=len))
        return [node.op_type for node in step.graph.node]

    short = operators(5)
    assert short == operators(7)
    assert short.count("Scan") == 4  # two layers, forward and backward


def test_an_lstm_beside_an_operator_in_place_agrees_with_torch(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.dense = torch.nn.LSTM(7, 5, batch_first=True), torch.nn.Linear(5, 5)

        def forward(self, x):
            return self.dense((self.lstm(x)[0][:, -1] + 1).mul_(2))

    export_bundle(Model(models.spec(Net, inputs=(Field("x", "float32", (9, 7)),))), create("fedavg"), tmp_path)


def test_an_lstm_over_the_examples_of_a_batch_is_refused():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.dense = torch.nn.LSTM(7, 5), torch.nn.Linear(5, 5)

        def forward(self, x):
            return self.dense(self.lstm(x)[0][:, -1])

    with pytest.raises(UnsupportedOperator, match="goes over the examples of a batch"):
        build_plan(Model(models.spec(Net, inputs=(Field("x", "float32", (9, 7)),))), create("fedavg"))


def test_the_same_export_gives_the_same_bytes(tmp_path):
    first, second = (
        export_bundle(Model(load("mlp")), create("mimelite"), tmp_path / name).manifest for name in ("a", "b")
    )
    assert (first.plan, first.state) == (second.plan, second.state)


@pytest.fixture(scope="module")
def digits():
    """The built-in CNN, and what runs one of FedAvg's steps on it."""
    model = Model(load("digits_cnn"))
    plan, graphs = build_plan(model, create("fedavg"))
    session = onnxruntime.InferenceSession(graphs[plan.graphs["onnx"]["train.steps"]])

    def step(params, **batch):
        after, sums = session.run(None, {"carry.params": params} | {name: fed[None] for name, fed in batch.items()})
        return after, sums[0]

    return model, step


@pytest.mark.parametrize("size", [1, 2, 33])
def test_one_graph_takes_any_batch_size(size, digits):
    model, step = digits
    random = np.random.default_rng(size)
    x = random.normal(size=(size, 1, 8, 8)).astype(np.float32)
    y = random.integers(0, 10, size)
    found, sums = step(model.initial, **{"example.x": x, "example.y": y, "mask": np.ones(size, np.float32)})
    leaves = {name: part.requires_grad_() for name, part in model.tensors(torch.from_numpy(model.initial)).items()}
    loss = torch.nn.functional.cross_entropy(
        torch.func.functional_call(model.module, leaves, torch.from_numpy(x)), torch.from_numpy(y)
    )
    gradient = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(leaves.values()))]).numpy()
    np.testing.assert_allclose(found, model.initial - 0.1 * gradient, atol=1e-6)
    np.testing.assert_allclose(sums[:2], [size, loss.item() * size], rtol=1e-5)


def test_a_masked_batch_equals_a_short_one(digits):
    model, step = digits
    random = np.random.default_rng(0)
    x, y = random.normal(size=(6, 1, 8, 8)).astype(np.float32), random.integers(0, 10, 6)

    def run(rows, mask):
        return step(model.initial, **{"example.x": x[rows], "example.y": y[rows], "mask": np.array(mask, np.float32)})

    short, padded = run([0, 1, 2], [1, 1, 1]), run([0, 1, 2, 5, 4, 3], [1, 1, 1, 0, 0, 0])
    np.testing.assert_allclose(padded[0], short[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(padded[1], short[1], rtol=1e-5)


STRIDES = [(1, 0, 1), (2, 1, 1), (3, 2, 2)]
CONVOLUTIONS = list(product([1, 2, 3], [4, 128], [(8, 7, 6), (17, 9, 8)], [1, 2, 4], STRIDES))


@pytest.mark.parametrize(
    ("axes", "channels", "size", "groups", "strides"), sampled(CONVOLUTIONS, CONVOLUTIONS[::2] + CONVOLUTIONS[-1:])
)
def test_a_convolution_and_its_gradients_are_torchs_in_every_form(axes, channels, size, groups, strides):
    """Every run has each size with each number of groups; of strides, paddings and dilations every other case."""
    torch.manual_seed(0)
    groups = channels if groups == 4 else groups
    x = torch.randn(3, channels, *size[:axes], dtype=torch.float64)
    weight = torch.randn(channels, channels // groups, *(3, 2, 2)[:axes], dtype=torch.float64)
    bias = torch.randn(channels, dtype=torch.float64)
    lists = [[one] * axes for one in strides]
    rest = (*lists, False, [0] * axes, groups)
    out = torch.ops.aten.convolution(x, weight, bias, *rest)
    ours = convolution(x, weight, bias, *rest)
    if ours is not NotImplemented:
        torch.testing.assert_close(ours, out)
    grad = torch.randn_like(out)
    arguments = (grad, x, weight, [channels], *rest, [True, True, True])
    for ours, theirs in zip(
        convolution_backward(*arguments), torch.ops.aten.convolution_backward(*arguments), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 1, 1), (3, 2, 1), (2, 3, 0)])
def test_max_pool_gradient_is_torchs_also_where_windows_overlap(kernel, stride, padding):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    arguments = ([kernel] * 2, [stride] * 2, [padding] * 2, [1, 1], False)
    out, indices = torch.ops.aten.max_pool2d_with_indices(x, *arguments)
    grad = torch.randn_like(out)
    theirs = torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *arguments, indices)
    torch.testing.assert_close(max_pool2d_backward(grad, x, *arguments, indices), theirs)


def test_an_output_may_be_an_input_and_leave_twice():
    captured = capture(
        lambda values: {"a": values["x"], "b": values["x"], "c": values["x"][:1] ** 3}, [Port("x", (2,))]
    )
    outputs = onnxruntime.InferenceSession(to_onnx(captured)).run(None, {"x": np.array([2, 3], np.float32)})
    assert [value.tolist() for value in outputs] == [[2, 3], [2, 3], [8]]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (models.batch_norm, UnsupportedModule, "layer '1' is batch normalisation.*to_group_norm"),
        (models.gru_dropout, UnsupportedModule, "is GRU with dropout"),
        (models.bounded_embedding, UnsupportedModule, "max_norm"),
        (models.counting_embedding, UnsupportedModule, "scale_grad_by_freq"),
        (models.sparse_embedding, UnsupportedModule, "sparse"),
        (models.sparse_bag, UnsupportedModule, "EmbeddingBag with sparse"),
        (models.spectral, ImpureModel, r"changes the buffer '1\.parametrizations"),
        (models.alpha_dropout, UnsupportedModule, "0 is AlphaDropout"),
        (models.dropped_examples, InvalidModel, "dropout of channels on values of 2 axes"),
        (models.integer_parameter, InvalidModel, "parameter table is torch.int64"),
        (models.all_frozen, InvalidModel, "no parameters to train: .* all are frozen"),
        (models.hooked_parameter, InvalidModel, "parameter 1.weight of layer '1' has a gradient hook"),
        (models.hooked_after_accumulation, InvalidModel, "parameter 3.bias of layer '3' has a gradient hook"),
        (models.wrong_width, InvalidModel, "the model does not run"),
        (models.no_parameters, InvalidModel, "no parameters"),
        (models.unbounded_label, InvalidModel, "field 'y' is int64: say its range"),
        (models.mean_loss, InvalidModel, "loss has shape .*reduction='none'"),
        (models.product_of_examples, UnsupportedOperator, r"a product over the examples of a batch.*own forward"),
        (models.lower_bits, UnsupportedOperator, r"aten.remainder.Scalar of numbers that are not whole.*own forward"),
        (models.tied_gates, ParityFailed, r"topk met equal values, .*sort\(..., stable=True\)"),
        (models.diverging, ParityFailed, "nan.*not finite.*`examples`"),
        (models.centred, ImpureModel, "the model's own forward lets the examples of a batch influence each other"),
        (models.noisy, ImpureModel, r"aten.randint_like.*own forward.*by nn.Dropout, randn_like"),
        (models.counting, ImpureModel, "changes the buffer 'count' in every call"),
        (models.aligned, UnsupportedOperator, "takes ctc_loss, whose tables .* take cross-entropy"),
        (models.misspelt, InvalidModel, "own forward.: AttributeError: .*nope"),
        (models.tuple_output, InvalidModel, "does not run: AttributeError: 'tuple'"),
        (models.failing, InvalidModel, "make.. fails with TypeError"),
        (models.token_beyond, InvalidModel, r"fails for 299 in field 'tokens', which may hold 0 … 299 \(IndexError"),
        (models.label_beyond, InvalidModel, "fails for 8 in field 'y', .*`high` be the number of classes"),
        (models.label_from_one, InvalidModel, "fails for 0 in field 'y', which may hold 0 … 4 "),
        (models.examples_that_spare_the_last_class, InvalidModel, "fails for 5 in field 'y', which may hold 0 … 5 "),
        (models.beside_float64, InvalidModel, r"loss is float64, .*end it with .float"),
        (models.measured_in_float64, InvalidModel, r"squares is float64, .*end it with .float"),
        (models.no_loss, InvalidModel, "loss is NoneType"),
        (models.broadcast_loss, InvalidModel, r"loss has shape .B, B., of outputs .B, 5. and labels .B.;"),
        (models.compiled, UnsupportedModule, "the model was compiled"),
        (models.checkpointed, InvalidModel, "torch.utils.checkpoint, .* computes in the backward pass, .*leave it out"),
        (models.holding_on, InvalidModel, "a parameter that is not one of its layers'.*register it"),
        (models.conditional, DynamicControlFlow, "by an operator of torch .*own forward"),
        (models.selecting, DynamicControlFlow, "as many values as the data decide"),
        (models.half, UnsupportedOperator, "computes in torch.float16"),
        (models.lazy, InvalidModel, "no values on the CPU"),
        (models.metric_called_loss, InvalidModel, "metric is called 'loss'"),
        (models.one_name_twice, InvalidModel, "x, x, y need names"),
        (models.doubles, InvalidModel, "'x' is float64"),
        (models.no_module, InvalidModel, "returns int, not a torch.nn.Module"),
        (models.branching, DynamicControlFlow, "torch.where"),
        (models.fixed_batch, DynamicControlFlow, "fixes its batch size: it runs for 7 examples and not for 2"),
        (models.fixed_state, DynamicControlFlow, "runs for 20 examples and not for 2; .*in layer 'cells'"),
        (models.looped_over_examples, DynamicControlFlow, "batch size as a number, as a loop over its examples"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(make, error, words, tmp_path):
    with pytest.raises(error, match=words):
        export_bundle(Model(make()), create("fedavg"), tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_a_model_whose_layers_keep_what_forward_computed_is_exported(tmp_path):
    def install(model):
        model[2].register_forward_hook(lambda layer, inputs, outputs: setattr(layer, "kept", [outputs]))
        with pytest.warns(FutureWarning, match="deprecated"):
            nn.utils.weight_norm(model[3])

    model = Model(models.hooked(install))
    export_bundle(model, create("fedavg", {"batch_size": 4}), tmp_path)
    assert model.schema.size == 126 * 8 + 8 + 8 * 5 + 5 + 5  # a length for each row of the last layer too


@pytest.mark.parametrize(
    "install",
    [
        lambda model: model[1].register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 1.5,)),
        lambda model: model[1].register_forward_hook(lambda layer, inputs, outputs: outputs * 1.5),
        lambda model: model[2].register_full_backward_pre_hook(lambda layer, outputs: (outputs[0] * 1.5,)),
        lambda model: model[2].register_full_backward_hook(lambda layer, inputs, outputs: (inputs[0] * 1.5,)),
    ],
)
def test_a_hook_of_a_layer_is_exported(install):
    hooked, plain = Model(models.hooked(install)), Model(models.hooked(lambda model: None))
    algorithm = create("fedavg", {"batch_size": 4})
    plan, graphs = build_plan(hooked, algorithm)
    backend = BACKENDS["onnxruntime"]()
    loaded = {part: backend.load(graphs[ref], part) for part, ref in plan.graphs["onnx"].items()}
    work, unhooked = Trial.draw(hooked, algorithm), Trial.draw(plain, algorithm)
    found = work.exported(plan, loaded)
    assert max(work.distances(found, work.reference()).values()) <= TOLERANCE
    assert min(work.distances(found, unhooked.reference()).values()) > 0.01


def test_parity_catches_a_graph_that_computes_something_else():
    model = Model(load("logreg"))
    algorithm = create("fedavg", {"client_lr": 0.1})
    wrong = build_plan(model, dataclasses.replace(algorithm, client_lr=0.1001))
    with pytest.raises(ParityFailed, match=r"train\.step|report"):
        certify(model, algorithm, *wrong)


@pytest.mark.parametrize(("name", "client_lr"), covering(reversed(QUICK), [1.0, 1e-3, 1e-5]))
def test_the_certificate_passes_right_graphs_at_any_step_size(name, client_lr):
    model, algorithm = Model(load(name)), create("fedavg", {"client_lr": client_lr})
    certify(model, algorithm, *build_plan(model, algorithm))


def test_a_kinked_network_is_held_to_its_right_gradients(monkeypatch):
    model, algorithm = Model(models.kinked()), create("fedavg", {"client_lr": 1.0})
    backward = torch.ops.aten.native_group_norm_backward.default
    right = TABLE[backward]

    def wrong(*arguments):
        inputs, weight, bias = right(*arguments)
        return inputs, weight * 1.001, bias

    certify(model, algorithm, *build_plan(model, algorithm))
    monkeypatch.setitem(TABLE, backward, wrong)
    with pytest.raises(ParityFailed):
        certify(model, algorithm, *build_plan(model, algorithm))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (models.changing_weights, r"changes its weights in forward by aten.mul_.*own forward"),
        (models.changing_weights_behind, "changes its weights in forward by aten.clamp_"),
        (models.changing_inputs, "changes its inputs in place by aten.mul_.*work on a copy"),
        (models.counting, "changes a buffer in place by aten.add_"),
    ],
)
def test_what_a_trace_may_not_change_in_place_is_said(make, words):
    model, item = Model(make()), create("fedavg").passes[0]
    params = [VectorSpec("params", model.initial.size)]
    with pytest.raises(InvalidModel, match=words):
        capture_step(model, item, Received(params, {}), params)


def test_a_batch_size_that_only_a_short_batch_does_not_fit_is_named(executorch, tmp_path):
    with pytest.raises(DynamicControlFlow, match="runs for 20 examples and not for 2"):
        export_bundle(Model(models.fixed_state()), create("fedavg"), tmp_path, targets=("executorch",))


def test_a_kink_that_the_first_examples_alone_meet_refuses_no_graph(monkeypatch):
    """Of sums that torch and ONNX Runtime round to different numbers one is a threshold."""
    algorithm = create("fedavg")
    plain = Trial.draw(Model(models.positions()), algorithm).batches["train"][0].fields["x"]
    summed = capture(lambda values: {"s": values["x"].flatten(1).sum(1)}, [Port("x", (2, 9, 7), batched=True)])
    (found,) = onnxruntime.InferenceSession(to_onnx(summed)).run(None, {"x": plain})
    torchs = torch.from_numpy(plain).flatten(1).sum(1).numpy()
    if np.array_equal(found, torchs):
        pytest.skip("torch and ONNX Runtime round alike on this machine")
    threshold = float(np.maximum(found, torchs)[found != torchs][0])
    model = Model(models.steep_at(threshold))
    built, drawn, draw = build_plan(model, algorithm), [], Trial.draw

    def watched(*args, seed=0, **kwargs):
        drawn.append(seed)
        return draw(*args, seed=seed, **kwargs)

    monkeypatch.setattr(Trial, "draw", watched)
    certify(model, algorithm, *built)
    assert set(drawn) == {0, 1}
    with pytest.raises(ParityFailed, match="other examples meet too"):
        certify(model, algorithm, *build_plan(Model(models.steep_at(threshold + 1)), algorithm))


def test_a_value_that_only_rounding_puts_beyond_a_kink_refuses_no_graph():
    """Thresholds that lie between a value and its neighbour stand for a processor that rounds otherwise."""
    algorithm = create("fedavg")
    trials = [Trial.draw(Model(models.positions()), algorithm, seed=seed) for seed in (0, 1)]
    firsts = [max(batch.fields["x"][:, 0, 0, 0].max() for batch in one.batches["train"]) for one in trials]
    model, neighbours = Model(models.stepped_at(*firsts)), [np.nextafter(first, np.float32(9)) for first in firsts]
    certificate = certify(model, algorithm, *build_plan(Model(models.stepped_at(*neighbours)), algorithm))
    assert 1e-4 < certificate.worst < certificate.formats["onnx"].tolerance
    with pytest.raises(ParityFailed):
        certify(model, algorithm, *build_plan(Model(models.stepped_at(*neighbours, slope=1.001)), algorithm))


@pytest.mark.parametrize("high", [5, 6, 1000])
def test_a_trial_reaches_the_ends_of_every_range_at_every_place(high):
    fields = (Field("i", "int64", (3,), high), Field("u", "uint8", (), 7), Field("x", "float32", (2,)))
    rare = ModelSpec("rare", lambda: nn.Linear(2, 3), cross_entropy, fields, Field("y", "int32", (2,), 5, ignored=-9))
    drawn = [batch.fields for batch in Trial.draw(Model(rare), create("fedavg", {"batch_size": 2})).batches["train"]]
    for name, ends in {"i": (0, high - 1), "u": (0, 6), "y": (0, 4, -9)}.items():
        values = np.concatenate([batch[name] for batch in drawn])
        assert all((values == end).any(0).all() for end in ends)


def test_the_first_of_equal_values_of_a_stable_sort_is_torchs(executorch, tmp_path):
    export_bundle(Model(models.ordered_gates()), create("fedavg"), tmp_path, targets=tuple(FORMATS))


def untrained_row(grad, indices, size, padding, scale):
    return EMBEDDING(grad, indices, size, padding, scale) * (torch.arange(size) != 3).to(grad.dtype)[:, None]


def with_padding_trained(grad, indices, size, padding, scale):
    return EMBEDDING(grad, indices, size, -1, scale)


@pytest.mark.parametrize("wrong", [untrained_row, with_padding_trained])
@pytest.mark.parametrize("algorithm", ["fedavg", "mimelite"])
def test_the_certificate_catches_one_row_of_an_embedding(wrong, algorithm, monkeypatch):
    model, algorithm = Model(models.vocabulary(padding=0)), create(algorithm)
    certify(model, algorithm, *build_plan(model, algorithm))
    monkeypatch.setitem(TABLE, torch.ops.aten.embedding_dense_backward.default, wrong)
    with pytest.raises(ParityFailed):
        certify(model, algorithm, *build_plan(model, algorithm))


@pytest.mark.parametrize("setting", ["client_lr", "beta1"])
def test_the_certificate_catches_one_percent_in_one_of_several_vectors(setting):
    model, algorithm = Model(load("mlp")), create("mimelite", {"client_lr": 0.01})
    wrong = dataclasses.replace(algorithm, **{setting: getattr(algorithm, setting) * 1.01})
    with pytest.raises(ParityFailed):
        certify(model, algorithm, *build_plan(model, wrong))


@pytest.mark.parametrize(
    ("burn_in_rounds", "wrong"), [(0, {"burn_in_steps": 6}), pytest.param(1, {"rho": 0.05}, marks=pytest.mark.long)]
)
def test_the_certificate_catches_what_only_late_steps_or_rounds_show(burn_in_rounds, wrong):
    """FedPA's first sample begins after five steps, and in rounds of burn-in it corrects nothing."""
    model, algorithm = Model(load("logreg")), create("fedpa", {"burn_in_rounds": burn_in_rounds})
    wrong = dataclasses.replace(algorithm, **wrong)
    with pytest.raises(ParityFailed):
        certify(model, algorithm, *build_plan(model, wrong))


def test_the_certificate_catches_wrong_metric_sums():
    model, algorithm = Model(load("logreg")), create("fedavg")
    other = Model(dataclasses.replace(model.spec, metrics={"accuracy": lambda out, y: -accuracy(out, y)}))
    with pytest.raises(ParityFailed, match=r"train\.step"):
        certify(model, algorithm, *build_plan(other, algorithm))


def test_what_torch_logs_while_a_trace_fails_is_not_heard(caplog):
    x = Port("x", (3,), batched=True)
    with pytest.raises(InvalidModel, match="gather"):
        capture(lambda values: {"out": values["x"].gather(1, values["x"].to(torch.uint8))}, [x])
    assert caplog.records == []


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Bundles of two built-in models, by name; `copy_of` gives a test its own."""
    folder, algorithm = tmp_path_factory.mktemp("exported"), create("fedavg")
    return {name: export_bundle(Model(load(name)), algorithm, folder / name, name) for name in ("logreg", "mlp")}


def copy_of(bundle, folder):
    return Bundle(shutil.copytree(bundle.folder, folder, dirs_exist_ok=True))


def test_verifying_a_bundle_imports_nothing_that_the_bundle_names(tmp_path):
    bundle = export_bundle(Model(models.regression()), create("fedavg"), tmp_path, "tests.export.models:regression")
    with pytest.raises(UnknownModel, match="if you trust that code"):
        verify_bundle(bundle)
    assert parities(verify_bundle(bundle, "tests.export.models:regression")) == parities(bundle.certificate)


def test_verify_recomputes_the_certificate_and_names_an_altered_blob(tmp_path):
    bundle = export_bundle(Model(load("mlp")), create("mimelite"), tmp_path, "mlp")
    assert parities(verify_bundle(bundle)) == parities(bundle.certificate)
    graph = tmp_path / "blobs" / bundle.plan.graphs["onnx"]["train.steps"].sha256
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    with pytest.raises(DigestMismatch):
        verify_bundle(bundle)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"passes": lambda plan: (replace(plan.passes[0], noise=True), *plan.passes[1:])}, "passes"),
        ({"passes": lambda plan: (replace(plan.passes[0], loop=replace(plan.passes[0].loop, epochs=9)),)}, "passes"),
        ({"report": lambda plan: replace(plan.report, weighting="uniform")}, "report"),
        ({"name": lambda plan: "other"}, "name"),
    ],
)
def test_verify_notices_a_plan_that_says_something_else_than_the_manifest(changes, word, exported, tmp_path):
    bundle = copy_of(exported["mlp"], tmp_path)
    plan = replace(bundle.plan, **{name: change(bundle.plan) for name, change in changes.items()}).encode()
    (tmp_path / "blobs" / BlobRef.of(plan).sha256).write_bytes(plan)
    manifest = replace(bundle.manifest, plan=BlobRef.of(plan))
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(ParityFailed, match=f"the plan's {word} are not"):
        verify_bundle(Bundle(tmp_path))


def other_evidence(certificate, **changes):
    return replace(certificate, formats={"onnx": replace(certificate.formats["onnx"], **changes)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda kept: replace(kept, formats={}), "is about"),
        (lambda kept: other_evidence(kept, parity=kept.formats["onnx"].parity[:1]), "other graphs"),
        (lambda kept: other_evidence(kept, version="opset 99"), "opset 99"),
        (lambda kept: other_evidence(kept, tolerance=1.0), "allows 1.0e"),
        (lambda kept: other_evidence(kept, tolerance=1e-12), "allows 1.0e-12"),
        (lambda kept: other_evidence(kept, footprint=replace(kept.formats["onnx"].footprint, peak_rss_mb=-1)), "have"),
    ],
)
def test_verify_notices_a_certificate_that_cannot_be(change, words, exported, tmp_path):
    bundle = copy_of(exported["logreg"], tmp_path)
    certificate = msgspec.json.encode(change(bundle.certificate))
    (tmp_path / "blobs" / BlobRef.of(certificate).sha256).write_bytes(certificate)
    manifest = replace(bundle.manifest, certificate=BlobRef.of(certificate))
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(ParityFailed, match=words):
        verify_bundle(Bundle(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: replace(manifest, name="other"),
        lambda manifest: replace(manifest, algorithm=replace(manifest.algorithm, settings={})),
        lambda manifest: replace(manifest, state=manifest.certificate),
    ],
)
def test_verify_notices_a_manifest_that_is_not_its_plans(change, exported, tmp_path):
    bundle = copy_of(exported["logreg"], tmp_path)
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(change(bundle.manifest)))
    with pytest.raises((ParityFailed, PlanError)):
        verify_bundle(Bundle(tmp_path))


def test_models_are_found_by_path_and_an_unknown_name_lists_the_known():
    assert load("tests.export.models:strided").name == "test"
    with pytest.raises(UnknownModel, match="logreg, mlp, digits_cnn"):
        load("resnet")
    with pytest.raises(UnknownModel, match="cannot import"):
        load("tests.export.models:absent")
    assert own_name("./tests/export/models.py:strided") == "tests.export.models:strided"
    assert load("tests/export/models.py:strided").name == "test"
    with pytest.raises(UnknownModel, match=r"/x/models.py is not in the working folder; go to /x for it"):
        load("/x/models.py:strided")
    with pytest.raises(UnknownModel, match=r"the working folder has no tests/export/absent\.py"):
        load("tests/export/absent.py:strided")
    with pytest.raises(InvalidModel, match="returned Linear"):
        load("tests.export.models:not_a_spec")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": 3}, "the name of a model is a text, not 3"),
        ({"make": nn.Linear(1, 1)}, "make is a module; give the function or class"),
        ({"make": "Net"}, "make is str, not a function"),
        ({"examples": 7}, "examples is int, not a function"),
        ({"inputs": Field("x", "float32", (1,))}, "inputs is one Field; write .*, with a comma"),
        ({"inputs": ("x",)}, "inputs are a tuple of Field"),
        ({"label": (Field("y", "float32", (1,)),)}, "label is one Field"),
        ({"metrics": [nn.functional.l1_loss]}, "metrics are functions by name"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_description_of_a_model_with_a_wrong_type_says_which(wrong, words):
    right = {"name": "own", "make": nn.Identity, "loss": nn.functional.mse_loss}
    fields = {"inputs": (Field("x", "float32", (1,)),), "label": Field("y", "float32", (1,))}
    with pytest.raises(InvalidModel, match=words):
        ModelSpec(**right | fields | wrong)


def test_initial_weights_follow_the_seed_alone():
    torch.manual_seed(5)
    first = Model(load("mlp"), seed=1)
    torch.manual_seed(6)
    again, other = Model(load("mlp"), seed=1), Model(load("mlp"), seed=2)
    np.testing.assert_array_equal(first.initial, again.initial)
    assert not np.array_equal(first.initial, other.initial)
