"""Recorded steps: plans of them, models, and Winograd's convolutions."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import muster
from export.build import verify_bundle
from export.model import Model, ModelSpec, accuracy, cross_entropy
from export.models import load as built_in
from export.trial_examples import draw_examples
from fedcore.algorithms import create
from fedcore.bundle import Bundle
from fedcore.errors import PlanError, UntrustedAlgorithm
from fedcore.plan import METRICS, BlobRef, Field
from simulator import read_run, resume_run
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.engines.graphs import export_graphs
from simulator.engines.oracle import CohortOracle
from simulator.engines.recorded.program import Program, Programs, Workspace
from simulator.engines.recorded.recording import record
from simulator.errors import DatasetError, EngineError
from simulator.planned import SimulatedPlan, completed_by_plan
from simulator.population import Population
from tests.export import test_promises
from tests.simulator.reference import reference_round

CPU = torch.device("cpu")


class Layers(nn.Module):
    """Images (1, 8, 8) or tokens (6,) to 10 classes: `forward` is given."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.last = nn.Linear(64, 20), nn.Linear(20, 10)
        self.convolution, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)
        self.halves, self.images = nn.Linear(40, 10), nn.Linear(9 * 64, 10)
        self.bias, self.other = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))
        self.embedding, self.recurrent = nn.Embedding(30, 8), nn.LSTM(8, 20, batch_first=True)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def recurrent(net, x):
    return net.last(net.recurrent(net.embedding(x))[0][:, -1])


def two_biases(net, x):
    return net.last(net.first(x.flatten(1)).tanh()) + (net.bias + net.other)


def same_part_twice(net, x):
    hidden = net.first(x.flatten(1)).tanh()
    return net.halves(torch.cat([hidden, hidden], 1))


def joined_images(net, x):
    hidden = torch.cat([x, net.convolution(x).relu()], 1)
    return net.images(torch.cat([hidden, net.second(hidden)], 1).flatten(1))


def input_in_place(net, x):
    x = x.flatten(1)
    x.sub_(0.5).mul_(2)
    return net.last(net.first(x))


def whole_in_place(net, x):
    hidden = net.first(x.flatten(1)).tanh()
    whole = torch.cat([hidden, hidden * 2], 1)
    whole.mul_(0.5)
    return net.halves(whole) + hidden[:, :10]


def turned_input(net, x):
    hidden = x[:, 0] * 2
    hidden.transpose_(1, 2)
    return net.last(net.first(hidden.flatten(1)))


def grown_from_nothing(net, x):
    grown = torch.empty(0)
    for _ in range(2):
        grown = torch.cat([grown, net.first(x.flatten(1)).tanh()], 1)
    return net.halves(grown)


FORWARDS = [
    recurrent, two_biases, same_part_twice, joined_images, input_in_place, whole_in_place, turned_input,
    grown_from_nothing,
]  # fmt: skip


@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.parametrize("forward", FORWARDS)
def test_the_gradient_of_a_recorded_model_is_that_of_the_model(forward, clients):
    field = Field("x", "int64", (6,), high=30) if forward is recurrent else Field("x", "float32", (1, 8, 8))
    label = Field("y", "int64", high=10)
    model = Model(ModelSpec("own", lambda: Layers(forward), cross_entropy, (field,), label, {"accuracy": accuracy}))
    programs, calls, mask = Programs(CPU), [], torch.ones(clients, 5)

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        shape = (clients, 5, *field.shape)
        x = torch.randint(30, shape, generator=generator) if field.high else torch.randn(shape, generator=generator)
        params = torch.from_numpy(model.initial) + 0.1 * torch.randn(clients, model.initial.size, generator=generator)
        return [x, torch.randint(10, (clients, 5), generator=generator), params]

    def step(x, y, params):
        calls.append(1)
        oracle = CohortOracle(model, {"x": x, "y": y}, mask)
        loss, gradient, _ = oracle(params)
        return {"params": params - 0.1 * gradient, "gradient": gradient, "loss": loss, METRICS: oracle.sums_KM}

    held = drawn(0)
    for seed in (1, 2):
        for memory, values in zip(held, drawn(seed), strict=True):
            memory.copy_(values)
        found = programs.run("key", lambda: step(*held), held, {"params": held[2]}) | {"params": held[2]}
        torch.testing.assert_close(found, step(*drawn(seed)))
    assert len(calls) == 1 + 2  # the program passed its trial


def trained(model, **computing):
    """What two rounds of three clients, whose last batches are short, make of a model, and their shards."""
    shards = [draw_examples(model.spec, count, np.random.default_rng(count)) for count in (3, 9, 6)]
    population, algorithm = Population.of(["a", "b", "c"], shards, 5), create("fedavg", {"batch_size": 4})
    engine = Engine(model, algorithm, population, seed=7, computing=Computing(**computing))
    for number in (1, 2):
        engine.run_round(number, range(3))
    return engine.state["params"], shards


@pytest.mark.parametrize(
    "spec",
    [
        test_promises.OPERATED,
        test_promises.PROMISES["losses"]["cross-entropy over pixels"][0],
        test_promises.PROMISES["losses"]["Gaussian likelihood"][0],
    ],
    ids=["operators", "pixels", "Gaussian"],
)
def test_what_can_be_exported_trains_in_the_engine_as_in_torch(spec):
    model, algorithm = Model(spec), create("fedavg", {"batch_size": 4})
    for at_once in (1, 3):
        found, shards = trained(model, at_once=at_once)
        state = {"params": model.initial}
        for number in (1, 2):
            state = reference_round(model, algorithm, state, shards, number, 7)
        moved = np.linalg.norm(state["params"] - model.initial)
        assert np.linalg.norm(found - state["params"]) < 1e-5 * moved


def test_the_engine_drops_the_channels_that_devices_drop():
    model = Model(test_promises.DROPPED_WHOLE)
    graphs = export_graphs(model, create("fedavg", {"batch_size": 4}))
    expected, _ = trained(model, graphs=graphs)
    for at_once in (1, 3):
        found, _ = trained(model, at_once=at_once)
        assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected - model.initial)


SHORT = {"rounds": 2, "cohort": 3, "evaluate_every": 1, "processes": 1}
SETTINGS = {"client_lr": 0.3, "batch_size": 10}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned") / "plan"
    return muster.export("logreg", "fedadam", folder, settings=SETTINGS, seed=5, compress="rotation,subsample=0.5")


@pytest.fixture
def changed(plan, tmp_path):
    """The same bundle with other members in its manifest."""

    def change(**members):
        shutil.copytree(plan.folder, tmp_path / "changed", dirs_exist_ok=True)
        path = tmp_path / "changed" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | members))
        return Bundle(tmp_path / "changed")

    return change


@pytest.fixture
def with_blob(changed):
    """Puts a blob into the changed bundle; gives its reference, as in a manifest."""

    def put(data):
        ref = BlobRef.of(data)
        (changed().folder / "blobs" / ref.sha256).write_bytes(data)
        return {"sha256": ref.sha256, "size": ref.size}

    return put


def test_a_plan_trains_as_its_model_and_settings_do(plan):
    by_graphs = muster.simulate("logreg", plan=plan.folder, **SHORT)
    assert by_graphs.result.engine_reason == "the graphs of the plan"
    assert (by_graphs.result.algorithm, by_graphs.result.settings["batch_size"]) == ("fedadam", 10)
    same = {"settings": SETTINGS, "compress": "rotation,subsample=0.5", "engine": "torch", **SHORT}
    # The seed of a simulation draws weights too; those of the plan were drawn under 5, the cohorts here under 0.
    from_zero = muster.simulate("logreg", "digits", "fedadam", **same)
    assert not np.allclose(by_graphs.params, from_zero.params, atol=1e-3)
    alike = muster.simulate("logreg", plan=plan.folder, seed=5, **SHORT)
    by_torch = muster.simulate("logreg", "digits", "fedadam", seed=5, **same)
    np.testing.assert_allclose(alike.params, by_torch.params, atol=1e-6)


def test_a_run_on_a_plan_is_kept_and_resumed_to_the_same_bits(plan, tmp_path):
    kept = muster.simulate("logreg", plan=plan.folder, out=tmp_path / "run", **SHORT)
    assert read_run(tmp_path / "run").config.plan == plan.folder
    (tmp_path / "run" / "result.json").unlink()
    next((tmp_path / "run").glob("checkpoint-*")).unlink()
    assert resume_run(tmp_path / "run").params_sha256 == kept.result.params_sha256


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settings": {"client_lr": 0.2}}, "the setting client_lr is 0.3 in the plan, not 0.2; leave the option out"),
        ({"algorithm": "mimelite"}, "algorithm is 'fedadam' in .*plan, not 'mimelite'; leave the option out"),
        ({"compress": "bits=8"}, "compress is 'rotation,subsample=0.5' in .*plan, not 'bits=8'"),
        ({"engine": "torch"}, "a plan trains by its own graphs, not by the engine torch"),
        ({"baseline": "pooled"}, "a plan trains by its own graphs, not by the baseline pooled"),
        ({"device": "cuda"}, "the graphs of a plan run on the CPU, not on cuda; leave device= out"),
        ({"model": built_in("logreg", (3,), 10)}, "the model logreg has other parameters or fields than the plan in"),
    ],
)
def test_options_that_contradict_the_plan_are_named(plan, options, words):
    with pytest.raises(EngineError, match=words):
        muster.simulate(**{"model": "logreg", "plan": plan.folder, **SHORT, **options})


def test_a_data_set_that_does_not_fit_is_named(plan):
    users = muster.Population.of(["a", "b"], [{"x": np.zeros((4, 3), np.float32), "y": np.arange(4)}] * 2)
    with pytest.raises(
        DatasetError, match=r"field 'x' is float32\[3\] per example, the model reads float32\[1, 8, 8\]"
    ):
        muster.simulate("logreg", users, plan=plan.folder, **SHORT | {"cohort": 1})


def test_what_a_bundle_lacks_is_named(plan, changed, with_blob, tmp_path):
    with pytest.raises(PlanError, match=r"is not a plan bundle: it has no manifest.json"):
        muster.simulate("logreg", plan=tmp_path, **SHORT)
    lost = changed(state={"sha256": BlobRef.of(b"lost").sha256, "size": 4})
    with pytest.raises(PlanError, match="lacks blob"):
        muster.simulate("logreg", plan=lost.folder, **SHORT)
    with pytest.raises(EngineError, match="compresses reports otherwise than its manifest says"):
        SimulatedPlan(changed(compress="").folder)
    other = changed(state=with_blob(b"no safetensors" * 500))
    with pytest.raises(EngineError, match="is not one of fedadam: not a safetensors file"):
        muster.simulate("logreg", plan=other.folder, **SHORT)


def test_a_plan_takes_no_memory_for_a_model_beyond_its_state(plan, changed, with_blob):
    with pytest.raises(PlanError, match=r"the model mlp has 4,810 parameters .* holds 2,0.. numbers at most"):
        muster.simulate("mlp", plan=plan.folder, **SHORT)
    said = json.loads(plan.read(plan.manifest.plan))
    said["examples"]["fields"][-1]["high"] = 10**12
    huge = changed(plan=with_blob(json.dumps(said).encode()))
    with pytest.raises(PlanError, match="the model logreg has 65,000,000,000,000 parameters"):
        muster.simulate("logreg", plan=huge.folder, **SHORT)


def test_a_compressed_plan_is_verified(plan):
    assert verify_bundle(plan).worst < 1e-5


def test_code_of_ones_own_must_be_named(changed):
    named = changed(algorithm={"name": "theirs:Algorithm", "settings": {}})
    with pytest.raises(UntrustedAlgorithm, match="'theirs:Algorithm'; if you trust its code, name it with --algorithm"):
        completed_by_plan({"plan": named.folder})


def test_a_model_object_measures_a_plan_that_names_it(tmp_path):
    spec = built_in("logreg")
    made = muster.export(spec, "fedavg", tmp_path / "plan")
    assert muster.simulate(spec, plan=str(made.folder), **SHORT).accuracy is not None


aten = torch.ops.aten
PLAIN = aten.convolution_backward.default


def layer(images, channels, *, bias=True, kernel=3, groups=1):
    """Images, kernel and bias as leaves, drawn under one seed; images: (B, channels in, height, width)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [images, (channels, images[1] // groups, kernel, kernel), (channels,)][: 3 if bias else 2]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [drawn[0].contiguous(memory_format=torch.channels_last), *drawn[1:]]


def differentiated(tensors, **how):
    """Results of a layer, and the gradients of the sum of their squares."""
    leaves = [one.detach().requires_grad_() for one in tensors]
    results = functional.conv2d(*leaves, **how)
    found = torch.autograd.grad(results.square().sum(), leaves)
    return {"results": results.detach(), **{str(number): one for number, one in enumerate(found)}}


def run(function, tensors):
    """What the program of a function gives, and its operators."""
    recording = record(function, tensors)
    program = Program(recording, Workspace(CPU), {})
    return program.run(), {call.operator for call in recording.calls}


def errors(found, exact):
    """The error of each output, relative to its norm."""
    return {name: float((found[name] - one).norm() / one.norm()) for name, one in exact.items()}


@pytest.mark.parametrize(
    ("images", "channels", "padding", "bias"),
    [
        ((12, 32, 26, 26), 64, 0, True),  # whole tiles, in several parts
        ((3, 64, 16, 16), 32, 1, False),
        ((2, 32, 27, 31), 48, 1, True),  # results that end inside of tiles
        ((2, 48, 10, 10), 40, (2, 0), True),
        ((1, 32, 16, 16), 64, 9, True),  # a bias whose gradient sums numbers of one sign
    ],
)
def test_gradients_are_those_of_layers_whose_results_stay_the_same(images, channels, padding, bias):
    tensors = layer(images, channels, bias=bias)
    found, operators = run(lambda: differentiated(tensors, padding=padding), tensors)
    exact = differentiated([one.double() for one in tensors], padding=padding)
    assert PLAIN not in operators
    assert max(errors(found, exact).values()) < 2e-6
    assert torch.equal(found["results"], differentiated(tensors, padding=padding)["results"])


@pytest.mark.parametrize(
    ("images", "channels", "kernel", "how"),
    [
        ((4, 32, 16, 16), 64, 3, {"stride": 2}),
        ((4, 32, 16, 16), 64, 3, {"dilation": 2}),
        ((4, 64, 16, 16), 64, 3, {"groups": 2}),
        ((4, 32, 16, 16), 64, 5, {}),
        ((4, 1, 16, 16), 64, 3, {}),  # too few channels to gain
        ((4, 32, 13, 13), 64, 3, {}),  # results that fill too little of their tiles
        ((0, 32, 16, 16), 64, 3, {}),
    ],
)
def test_other_layers_are_left_to_torch(images, channels, kernel, how):
    tensors = layer(images, channels, kernel=kernel, groups=how.get("groups", 1))
    _, operators = run(lambda: differentiated(tensors, **how), tensors)
    assert PLAIN in operators


def test_a_layer_that_is_differentiated_twice_has_both_gradients():
    tensors = layer((2, 32, 10, 10), 64)

    def function():
        first = differentiated(tensors)
        second = differentiated(tensors)
        return {name: one * 2 + second[name] for name, one in first.items()}

    found, operators = run(function, tensors)
    assert PLAIN not in operators
    assert max(errors(found, function()).values()) < 5e-6


def test_a_gradient_of_the_kernel_alone_is_left_to_torch():
    images, kernel, bias = layer((2, 32, 10, 10), 64)

    def function():
        weights = kernel.detach().requires_grad_()
        return {"kernel": torch.autograd.grad(functional.conv2d(images, weights, bias).square().sum(), weights)[0]}

    found, operators = run(function, [images, kernel, bias])
    assert PLAIN in operators
    assert max(errors(found, function()).values()) < 5e-6
