"""ExecuTorch programs against torch, on the libraries that devices run: three steps, the last on a masked batch."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from device_runtime.backends.executorch import ExecuTorch
from export.capture import Port, Received, capture, capture_begin, capture_report, capture_step
from export.errors import ExportError, UnsupportedOperator
from export.executorch import TABLE, to_executorch
from export.model import GradientOracle, Model
from export.models import load
from fedcore.algorithms import create
from fedcore.params import VectorSpec
from tests.export import test_rules
from tests.export.models import regression
from tests.export.test_promises import branches

pytestmark = pytest.mark.usefixtures("executorch")

BATCH = 5
X, INDEX = Port("x", (4, 6), batched=True), Port("i", (4,), torch.int64, batched=True)
NOISE = Port("n", (), torch.int32, batched=True)


def assigned(x, place, values):
    made = x * 1
    made[place] = values
    return made


def pool_gradient(x, *window):
    """Of values of which many are equal, through a max-pool."""
    leaf = x.floor().unsqueeze(1).detach().requires_grad_()
    largest = functional.max_pool2d(leaf, *window)
    return torch.autograd.grad((largest * (largest + 0.5)).sum(), leaf)[0]


FUNCTIONS = {
    "slices with negative and absent bounds": lambda x, i, n: x[:, -3:-1, ::2],
    "the last index": lambda x, i, n: x[:, -1, -2],
    "squeeze of an axis that is not of size one": lambda x, i, n: x.squeeze(1) + x.unsqueeze(-1).squeeze(-1),
    "integer division gives floats": lambda x, i, n: i / 4,
    "integers and floats promote": lambda x, i, n: x * i.unsqueeze(-1) + 1,
    "comparison of an integer with a float": lambda x, i, n: (i > 1.5).to(torch.float32),
    "sum of everything, and of booleans": lambda x, i, n: x.sum() + (i > 1).sum(),
    "sums over axes that are apart": lambda x, i, n: x.sum((0, 2)),
    "mean over axes, kept": lambda x, i, n: x.mean((0, -1), keepdim=True) - x,
    "long sums": lambda x, i, n: x.abs().repeat(1, 7, 300).sum(-1) + x.repeat(1, 7, 11).exp().sum((1, 2)).unsqueeze(-1),
    "sum over the middle": lambda x, i, n: x.sum(1) + x.amax(1),
    "softmax over a middle axis": lambda x, i, n: x.softmax(1) * x.softmax(-1) + x.log_softmax(1),
    "pads on two axes, unequal": lambda x, i, n: functional.pad(x, (1, 2, 0, 3), value=0.5) * 2,
    "clamp on one side": lambda x, i, n: x.clamp(min=-0.2).clamp(max=0.7),
    "gather along the last axis": lambda x, i, n: x.gather(2, i.unsqueeze(-1)),
    "scatter of one number": lambda x, i, n: x.scatter(2, i.unsqueeze(-1), 9.0),
    "repeated indices add up": lambda x, i, n: torch.zeros_like(x).scatter_add(
        2, i.unsqueeze(-1).expand(-1, -1, 6) * 0, x
    ),
    "rows added at indices": lambda x, i, n: x.new_zeros(4, 6).index_put((i[:, 0],), x[:, 0], accumulate=True),
    "rows looked up": lambda x, i, n: functional.embedding(i, x[0]),
    "a choice": lambda x, i, n: torch.where((x > 0) & (x < 1) | (x == x.amax()), x, 0.0) + torch.where(x <= 0, -1.0, x),
    "new leading axis by expand": lambda x, i, n: x[:, :1].expand(-1, 5, -1) * 2,
    "expanded and flattened": lambda x, i, n: x[:, :, :1].expand(-1, -1, 6).flatten(1) + x.flatten(1),
    "powers": lambda x, i, n: x.abs() ** 0.5 + x**2 + x.abs() ** 1.7 + (x.abs() + 1) ** -1,
    "unary functions": lambda x, i, n: x.exp() + x.abs().sqrt() + (x.abs() + 1).log() - x.neg().tanh() + x.erf(),
    "more of them": lambda x, i, n: x.sigmoid() + (x.abs() + 1).rsqrt() + x.floor() + x.ceil() + x.abs().reciprocal(),
    "differences with factors": lambda x, i, n: torch.add(x, x, alpha=3) - torch.sub(1, x) * (2 - x) / (x.abs() + 1),
    "concatenation of many": lambda x, i, n: torch.cat([x, x + 1, i.unsqueeze(-1).to(x.dtype), x, x, x * 2, x], -1),
    "concatenation of few": lambda x, i, n: torch.stack([x + 1, x * 2], 1),
    "transposes that meet": lambda x, i, n: ((x.mT + 1) * x.mT).relu().mT + x,
    "products": lambda x, i, n: (x.transpose(1, 2) @ x) @ (x.transpose(1, 2) @ x).mT,
    "products of matrices": lambda x, i, n: x[0] @ x[1].t() @ (x[2].t() @ x[3]).t()[:4],
    "products with a sum": lambda x, i, n: torch.addmm(x[0, :4], x[0, :, :4], x[1], alpha=2, beta=0.5),
    "products with a vector": lambda x, i, n: torch.addmm(x[0, 0], x[1, :, :4], x[2]),
    "the largest and where": lambda x, i, n: torch.maximum(x, -x).minimum(x + 1) + x.argmax(-1, keepdim=True),
    "integers that wrap": lambda x, i, n: (n * (n + n + 1) >= 5).to(torch.float32) + (n * n).to(torch.float32),
    "a table of constants": lambda x, i, n: x + torch.arange(6) * (torch.arange(4) > 1).unsqueeze(1),
    "an input as it is": lambda x, i, n: x,
    "the first of equal values gets the gradient": lambda x, i, n: pool_gradient(x, 2) + pool_gradient(x, 3, 1, 1),
    "the first of equal values, with windows past the end": lambda x, i, n: (
        pool_gradient(x, 2, 3, 1, 1, True) + pool_gradient(x, 3, 2, 1, 1, True)
    ),
    "places of the largest, with windows past the end": lambda x, i, n: functional.max_pool2d(
        x[:, None], (3, 4), return_indices=True, ceil_mode=True
    )[1],
    "padding that cuts off": lambda x, i, n: functional.pad(x, (-1, 2, -2, 0), value=0.5) * 2,
    "padding that only cuts off": lambda x, i, n: functional.pad(x * 2, (0, -2, -1, -1)),
    "the largest along an axis and its place": lambda x, i, n: sum(x.max(1, keepdim=True)),
    "the smallest along an axis and its place": lambda x, i, n: sum(x.floor().min(-1)),
    "any number that is not zero": lambda x, i, n: i.any(-1, keepdim=True).to(torch.float32),
    "a place is set": lambda x, i, n: assigned(x, (slice(None), 1, -2), 0.0),
    "a slice is set": lambda x, i, n: assigned(x, (slice(None), slice(1, 3)), x[:, :2] * 2),
    "every other place is set": lambda x, i, n: assigned(x, (Ellipsis, slice(-5, -1, 2)), x[..., :2]),
    "one of every kind": lambda x, i, n: functional.one_hot(i, 5),
    "more axes than XNNPACK has": lambda x, i, n: ((x * 2).reshape(-1, 2, 2, 1, 3, 1, 2) + 1).reshape(x.shape) * 3,
    "several times a small integer beside floats": lambda x, i, n: torch.add(
        x, (i + 200).to(torch.uint8).unsqueeze(-1), alpha=3
    ),
    "squares of truth": lambda x, i, n: (i > 1) ** 2,
    "nothing but constants": lambda x, i, n: torch.ones(3) * 2,
    "a number per example": lambda x, i, n: x.sum((1, 2)) / x.sum(),
}


# Of the functions that are tried for ONNX, those that nothing above is like.
ALSO = [name for name in test_rules.FUNCTIONS if "whole number" in name or "middle" in name or "byte" in name]

# Their programs have all kernels, and types of values, that the gradients of test_rules.py have.
SAMPLE = {
    "attention",
    "cross-entropy with smoothing",
    "clamp",
    "values at places that are set",
    "a cumulative sum",
    "a product of what no batch has",
    "a cumulative product",
    "an order",
    "a sort of equal values",
    "a power of a number",
    "a power of a value",
    "cross-entropy over pixels",
    "softplus of a reversed value",
}


def written(function):
    """A program of one function of all inputs."""
    inputs = (X, INDEX, NOISE)
    return to_executorch(capture(lambda values: {"out": function(*values.values())}, inputs, BATCH, table=TABLE))


def assert_computes_what_torch_computes(function, inputs, feeds):
    """One program of a function, from tensors by name to tensors by name, gives what it gives for every feed."""
    program = ExecuTorch().load(to_executorch(capture(function, inputs, BATCH, table=TABLE)))
    for feed in feeds:
        expected = function({name: torch.from_numpy(value) for name, value in feed.items()})
        found = {name: np.full_like(value.numpy(), 7) for name, value in expected.items()}
        program.run(feed, found)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def drawn(seed):
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(BATCH, 4, 6)).astype(np.float32),
        "i": random.integers(0, 4, (BATCH, 4)),
        "n": random.integers(-(2**31), 2**31, BATCH, np.int32),
    }


@pytest.mark.parametrize("functions", test_rules.in_groups(FUNCTIONS))
def test_operators_compute_what_torch_computes_every_time(functions):
    def results(values):
        return {name: function(*values.values()) for name, function in functions.items()}

    assert_computes_what_torch_computes(results, (X, INDEX, NOISE), [drawn(seed) for seed in range(3)])


def test_functions_that_are_tried_for_onnx_compute_the_same_here():
    results = functools.partial(test_rules.results, {name: test_rules.FUNCTIONS[name] for name in ALSO})
    assert_computes_what_torch_computes(results, (X, INDEX), [drawn(0)])


def in_sample(chosen):
    return test_rules.in_groups({name: one for name, one in test_rules.GRADIENTS.items() if (name in SAMPLE) == chosen})


@pytest.mark.parametrize(
    "functions",
    [*in_sample(True), *(pytest.param(*one.values, id=one.id, marks=pytest.mark.long) for one in in_sample(False))],
)
def test_gradients_are_torchs(functions):
    """Every run has each kernel with each type of values; what makes gradients of these, test_rules.py has."""
    gradients = functools.partial(test_rules.gradients, functions)
    assert_computes_what_torch_computes(gradients, [X], [{"x": drawn(0)["x"]}])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 12)

    def forward(self, x):
        parts = self.first(x.flatten(1, 2)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(*parts, is_causal=True).flatten(1)


LAYERS = {
    "convolution": [lambda: nn.Conv2d(2, 6, 3), nn.Tanh, lambda: nn.Conv2d(6, 3, 3, padding=1)],
    "convolution with strides": [lambda: nn.Conv2d(2, 4, 3, (2, 3), 1), nn.Tanh, lambda: nn.Conv2d(4, 3, 2, 2)],
    "convolution with dilation": [nn.Tanh, lambda: nn.Conv2d(2, 4, (3, 2), 1, (1, 2), (2, 3)), nn.Tanh],
    "padding beyond the kernel": [
        lambda: nn.Conv2d(2, 3, 2, padding=3),
        nn.Tanh,
        lambda: nn.Conv2d(3, 3, 2, padding=2),
    ],
    "one by one, with and without stride": [lambda: nn.Conv2d(2, 4, 1), nn.Tanh, lambda: nn.Conv2d(4, 3, 1, 2)],
    "more weights than positions": [lambda: nn.Conv2d(2, 40, 3, 3), nn.Tanh, lambda: nn.Conv2d(40, 40, 3, padding=1)],
    "one axis": [lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 4, 5, 2, 1), nn.Tanh, lambda: nn.Conv1d(4, 3, 3)],
    "three axes": [lambda: nn.Unflatten(1, (1, 2)), lambda: nn.Conv3d(1, 3, (2, 3, 3), 1, 1), nn.Tanh],
    "depthwise": [lambda: nn.Conv2d(2, 6, 1), lambda: nn.Conv2d(6, 6, 3, 2, 1, groups=6), nn.Tanh],
    "groups": [lambda: nn.Conv2d(2, 6, 1), lambda: nn.Conv2d(6, 9, 3, 2, 1, groups=3), nn.Tanh],
    "max-pool in tiles, with a rest": [lambda: nn.Conv2d(2, 4, 3, padding=1), lambda: nn.MaxPool2d(2)],
    "max-pool that overlaps": [lambda: nn.Conv2d(2, 4, 3), lambda: nn.MaxPool2d(3, 2, 1)],
    "average pools": [lambda: nn.Conv2d(2, 4, 3), lambda: nn.AvgPool2d(2), lambda: nn.AdaptiveAvgPool2d(1)],
    "group normalisation": [lambda: nn.Conv2d(2, 6, 3), lambda: nn.GroupNorm(3, 6), nn.SiLU],
    "without factors": [lambda: nn.Conv2d(2, 6, 3), lambda: nn.GroupNorm(1, 6, affine=False), nn.SiLU],
    "layer normalisation": [nn.Flatten, lambda: nn.Linear(126, 8), lambda: nn.LayerNorm(8), nn.GELU],
    "activations": [nn.Flatten, lambda: nn.Linear(126, 8), nn.ELU, nn.Softplus, nn.LeakyReLU, nn.Sigmoid],
    "clipped activations": [lambda: nn.Conv2d(2, 6, 3), nn.ReLU, nn.Hardtanh, nn.ReLU6, lambda: nn.GELU("tanh")],
    "attention": [Attention],
    "dropout": [nn.Flatten, lambda: nn.Dropout(0.3), lambda: nn.Linear(126, 8), nn.Tanh, nn.Dropout],
}


def after_three_steps(model, algorithm):
    """The carries of every pass, and reports, as (ours, torch's)."""
    received = algorithm.broadcast(algorithm.init(torch.from_numpy(model.initial)))
    broadcast = [VectorSpec(name, vector.numel()) for name, vector in received.items()]
    feed = {f"broadcast.{name}": vector.numpy() for name, vector in received.items()}
    carries, theirs = {}, {}
    for item in algorithm.passes:
        known = Received(broadcast, dict(carries))
        begin = capture_begin(item, known)
        step = capture_step(model, item, known, begin.specs, BATCH, TABLE)
        carries[item.name], expected = begin.specs, item.begin(received)
        state, program = (
            run(ExecuTorch().load(to_executorch(begin)), begin, feed),
            ExecuTorch().load(to_executorch(step)),
        )
        for batch, mask, noise in batches(model):
            carry = {f"carry.{spec.name}": state[f"next.{spec.name}"] for spec in begin.specs}
            examples = {f"example.{name}": values for name, values in batch.items()}
            state = run(program, step, feed | carry | examples | {"mask": mask, "noise": noise})
            tensors = {field: torch.from_numpy(values) for field, values in batch.items()}
            oracle = GradientOracle(model, tensors, torch.from_numpy(mask), torch.from_numpy(noise))
            expected = {name: value.detach() for name, value in item.step(expected, received, oracle).items()}
            np.testing.assert_allclose(state["metrics"], oracle.sums.detach(), rtol=1e-4)
        feed |= {f"{item.name}.carry.{spec.name}": state[f"next.{spec.name}"] for spec in begin.specs}
        theirs[item.name] = expected
    report = capture_report(algorithm, Received(broadcast, carries))
    return run(ExecuTorch().load(to_executorch(report)), report, feed), algorithm.report(received, theirs)


def run(program, captured, feed):
    shapes = {
        name: tuple(node.meta["val"].shape) for name, node in zip(captured.outputs, captured.results, strict=True)
    }
    made = {name: np.full(shape, 7, np.float32) for name, shape in shapes.items()}
    program.run({port.name: feed[port.name] for port in captured.inputs}, made)
    return made


def batches(model):
    random = np.random.default_rng(0)
    for step in range(3):
        batch = {
            field.name: random.normal(size=(BATCH, *field.shape)).astype(np.float32)
            if field.dtype == "float32"
            else random.integers(0, field.high, (BATCH, *field.shape))
            for field in model.spec.fields
        }
        mask = (np.arange(BATCH) < (BATCH if step < 2 else 3)).astype(np.float32)
        yield batch, mask, random.integers(-(2**31), 2**31, BATCH, np.int32)


def assert_agree(model, algorithm="fedavg", tolerance=1e-5):
    found, expected = after_three_steps(model, create(algorithm))
    for name, value in expected.items():
        distance = np.linalg.norm(found[name] - value.numpy())
        scale = max(float(torch.linalg.norm(value)), 1e-2 * float(np.linalg.norm(model.initial)))
        assert distance <= tolerance * scale, name


@pytest.mark.parametrize("layers", test_rules.in_groups(LAYERS))
def test_layers_side_by_side_train_as_in_torch(layers):
    assert_agree(Model(branches(*layers.values())))


def test_two_layers_of_lstm_train_as_in_torch():
    """As char_lstm has them. The other built-in models run at full size: test_golden.py."""
    assert_agree(Model(load("char_lstm", (7,), 11)))


def test_every_pass_of_an_algorithm_runs():
    assert_agree(Model(regression()), "mimelite")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, i, n: x.cummax(1).values, "cummax"),
        (lambda x, i, n: x.repeat(1, 1, 200).sort(-1).values, "sort of 1200 values in ExecuTorch"),
        (lambda x, i, n: x % 0.3, "remainder"),
        (lambda x, i, n: torch.cdist(x, x, p=3), "cdist with p=3"),
        (lambda x, i, n: x.lgamma(), "lgamma"),
        (lambda x, i, n: functional.batch_norm(x, None, None, training=True), "batch normalisation"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(function, words):
    with pytest.raises(UnsupportedOperator, match=words):
        written(function)


def test_equal_graphs_give_equal_bytes():
    model, item = Model(load("mlp")), create("fedavg").passes[0]
    specs = [VectorSpec("params", model.initial.size)]
    known = Received(specs, {})
    first, second = (to_executorch(capture_step(model, item, known, specs, BATCH, TABLE)) for _ in range(2))
    assert first == second


def test_calls_may_alternate_between_buffers():
    program = ExecuTorch().load(written(lambda x, i, n: x * 2 + i.unsqueeze(-1)))
    buffers = [np.zeros((BATCH, 4, 6), np.float32) for _ in range(2)]
    indices = np.zeros((BATCH, 4), np.int64)
    buffers[0] += 1
    for turn in range(4):
        program.run({"x": buffers[turn % 2], "i": indices}, {"out": buffers[1 - turn % 2]})
    assert np.all(buffers[0] == 16)


@pytest.mark.long
def test_exporting_is_silent():
    code = """if True:
        from export.capture import Port, capture
        from export.executorch import TABLE, to_executorch
        to_executorch(capture(lambda values: {"out": values["x"] + 1}, [Port("x", (4,))], 2, table=TABLE))
    """
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_missing_exporter_is_named(monkeypatch):
    captured = capture(lambda values: {"out": values["x"] + 1}, [Port("x", (4,))], 2, table=TABLE)
    monkeypatch.delitem(sys.modules, "export.executorch.program", raising=False)
    monkeypatch.delattr("export.executorch.program", raising=False)
    monkeypatch.setitem(sys.modules, "executorch", None)
    monkeypatch.setitem(sys.modules, "executorch.exir", None)
    with pytest.raises(ExportError, match=r"pip install muster-fl\[executorch\]"):
        to_executorch(captured)
