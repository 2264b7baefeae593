"""Rules that are easy to write wrong, each against torch, at batch sizes that the trace did not see."""

import collections
import functools

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.nn import functional

from export.capture import Port, capture
from export.errors import UnsupportedOperator
from export.onnx import to_onnx

X, INDEX = Port("x", (4, 6), batched=True), Port("i", (4,), torch.int64, batched=True)


def assigned(x, place, values):
    made = x * 1
    made[place] = values
    return made


FUNCTIONS = {
    "slices with negative and absent bounds": lambda x, i: x[:, -3:-1, ::2],
    "the last index": lambda x, i: x[:, -1, -2],
    "squeeze of an axis that is not of size one": lambda x, i: x.squeeze(1) + x.unsqueeze(-1).squeeze(-1),
    "the batch size as a number": lambda x, i: x.sum() / x.shape[0] + x.numel(),
    "integer division gives floats": lambda x, i: i / 4,
    "integers and floats promote": lambda x, i: x * i.unsqueeze(-1) + 1,
    "comparison of an integer with a float": lambda x, i: (i > 1.5).to(torch.float32),
    "reduction over all axes": lambda x, i: x.sum() + x.amax((0, 1, 2)),
    "reduction over several axes, kept": lambda x, i: x.mean((0, -1), keepdim=True) - x,
    "softmax over a middle axis": lambda x, i: x.softmax(1),
    "pads on two axes, unequal": lambda x, i: functional.pad(x, (1, 2, 0, 3), value=0.5),
    "clamp on one side": lambda x, i: x.clamp(min=-0.2).clamp(max=0.7),
    "gather along the last axis": lambda x, i: x.gather(2, i.unsqueeze(-1)),
    "scatter of one number": lambda x, i: x.scatter(2, i.unsqueeze(-1), 9.0),
    "repeated indices add up": lambda x, i: torch.zeros_like(x).scatter_add(
        2, i.unsqueeze(-1).expand(-1, -1, 6) * 0, x
    ),
    "new leading axis by expand": lambda x, i: x[:, :1].expand(-1, 5, -1),
    "powers": lambda x, i: x.abs() ** 0.5 + x**2 + x.abs() ** 1.7 + (x.abs() + 1) ** -1,
    "concatenation of an integer with a float": lambda x, i: torch.cat([i.to(torch.float32).unsqueeze(-1), x], -1),
    "every other value from the end": lambda x, i: x.flip(1, 2)[..., ::2],
    "the first of equal largest": lambda x, i: (x > 0).to(torch.float32).argmax(-1),
    "the largest along a middle axis, kept": lambda x, i: x.argmax(1, keepdim=True),
    "rows of a table": lambda x, i: functional.embedding(i, x[0]),
    "repeats along new and old axes": lambda x, i: x.repeat(2, 1, 1, 3).cos(),
    "any along an axis": lambda x, i: (x > 1).any(-1, keepdim=True).to(torch.float32),
    "negation of truth": lambda x, i: (~(x > 0)).to(torch.float32),
    "logarithm of a softmax": lambda x, i: x.log_softmax(1),
    "rows added where an index says": lambda x, i: torch.zeros(4, 6).index_put((i[:, 0],), x[:, 0], accumulate=True),
    "positions, made from nothing": lambda x, i: x + torch.arange(6) * torch.ones(4, 6).tril(),
    "signs and whole parts": lambda x, i: x.sign() + x.floor() * x.ceil(),
    "the largest along an axis and its place": lambda x, i: sum(x.max(1, keepdim=True)),
    "the smallest along an axis and its place": lambda x, i: sum(i.to(torch.int32).min(-1)),
    "the largest and the smallest of all": lambda x, i: x.max() - x.min(),
    "products and sums of truth": lambda x, i: ((x > 0) * (x < 1) + (x == 0)).to(torch.float32),
    "any number that is not zero": lambda x, i: i.any(-1, keepdim=True).to(torch.float32),
    "rows added where a small integer says": lambda x, i: torch.zeros(4, 6).index_put(
        (i[:, 0].to(torch.int32),), x[:, 0], accumulate=True
    ),
    "a place is set": lambda x, i: assigned(x, (slice(None), 1, -2), 0.0),
    "a slice is set": lambda x, i: assigned(x, (slice(None), slice(1, 3)), x[:, :2] * 2),
    "every other place is set": lambda x, i: assigned(x, (Ellipsis, slice(-5, -1, 2)), x[..., :2]),
    "everything is set": lambda x, i: assigned(x, (slice(None), slice(None)), x * 2),
    "one of every kind": lambda x, i: functional.one_hot(i, 5),
    "average with weights by batched product": lambda x, i: x.transpose(1, 2) @ x,
    "what whole numbers leave, with the sign of the divisor": lambda x, i: (2 * i - 3) % 4 - (2 * i - 3) % -4,
    "what whole numbers leave of each other": lambda x, i: ((i - 2) % (i + 1)).int() % (i.int() + 2),
    "whole numbers rounded down": lambda x, i: (2 * i - 3) // 2 + (i - 3) // -2 + (i - 3) // (i + 1),
    "small whole numbers rounded down": lambda x, i: ((i - 2).int() // 3) * (i.to(torch.uint8) // 2),
    "powers of whole numbers": lambda x, i: 2**i + i**i,
    "the order of whole numbers of which many are equal": lambda x, i: (
        i.argsort(dim=-1, stable=True) + i.sort(-1).values
    ),
    "from the largest, the first of equal ones first": lambda x, i: i.argsort(dim=-1, descending=True, stable=True),
    "the lower one in the middle": lambda x, i: x.median(1, keepdim=True).values + i.median(-1).values[:, None, None],
    "powers of whole numbers below nothing": lambda x, i: (i - 2) ** (i - 3) + (i - 2).int() ** (1 - i).int(),
    "the opposite bits of whole numbers": lambda x, i: ~i + ~(i - 2).int() * ~i.to(torch.uint8),
    "whether any byte is not zero, and the opposite of its bits": lambda x, i: ~i.to(torch.uint8).any(-1),
    "a choice between truths": lambda x, i: (i > 1).masked_fill(i == 0, value=True),
    "products of whole numbers": lambda x, i: i.int().prod(-1) + (i + 1).cumprod(-1).sum(-1),
    "logarithms of powers": lambda x, i: (2.0**i).log2() + (10.0**i).log10(),
}

GRADIENTS = {
    "a slice": lambda x: x[:, 1:3],
    "a slice with a step": lambda x: x[:, :, 1::2],
    "a slice with a step that does not end at the end": lambda x: x[:, :, 0:5:3],
    "one place from the end": lambda x: x[:, -2],
    "an average over windows side by side": lambda x: functional.avg_pool2d(x, (2, 4)),
    "the largest of windows side by side": lambda x: functional.max_pool2d(x.unsqueeze(1), (3, 2)),
    "the largest of windows that overlap": lambda x: functional.max_pool2d(x[:, None], 3, 1, 1),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x * 2, x.sin(), is_causal=True),
    "attention under a mask": lambda x: functional.scaled_dot_product_attention(x, x, x, torch.ones(4, 4) * 0.3),
    "cross-entropy with a class left out": lambda x: functional.cross_entropy(
        x.flatten(0, 1), (x.flatten(0, 1)[:, 0] > 0).long(), ignore_index=0, reduction="none"
    ),
    "cross-entropy with smoothing": lambda x: functional.cross_entropy(
        x.flatten(0, 1), (x.flatten(0, 1)[:, 0] > 0).long(), label_smoothing=0.1, reduction="none"
    ),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "a change in place": lambda x: functional.relu((x * 2).add_(1), inplace=True),
    "an average over windows that overlap and reach out": lambda x: functional.avg_pool2d(
        x, 3, 2, 1, divisor_override=5
    ),
    "an average that counts padding": lambda x: functional.avg_pool1d(x, 3, 2, 1, ceil_mode=True),
    "a repetition": lambda x: functional.interpolate(x, scale_factor=3),
    "the nearest of exact places": lambda x: functional.interpolate(x, 10, mode="nearest-exact"),
    "a line between values that keeps corners": lambda x: functional.interpolate(
        x, 9, mode="linear", align_corners=True
    ),
    "maxima of cells": lambda x: functional.adaptive_max_pool1d(x.round(), 4),
    "values at places, with places apart": lambda x: x.unflatten(2, (3, 2))[:, [1, -1, 1], :, [0, 1, 0]],
    "values at places that are set": lambda x: assigned(x, (slice(None), [0, 2], [1, 1]), x[:, :1, 0] * 2),
    "a cumulative sum": lambda x: x.cumsum(1),
    "a product": lambda x: x.prod(1) + x[:, :3].prod(1),
    "a product of everything but the batch": lambda x: x.flatten(1).prod(1, keepdim=True),
    "a product with a zero": lambda x: (x * (x > -0.5)).prod(1),
    "a product of what no batch has": lambda x: x * x.mean(0)[:, 0].prod() * x.mean(0).median(),
    "a cumulative product": lambda x: x.cumprod(2),
    "a sort": lambda x: x.sort(1).values * torch.arange(6) + x.sort(descending=True).values * torch.arange(6) ** 2,
    "an order": lambda x: x * x.argsort(1) + x.argsort(descending=True) * x**2,
    "a sort of equal values": lambda x: (
        x.round().detach().add(x - x.detach()).sort(dim=1, stable=True).values ** 3 * torch.arange(1, 5)[:, None]
    ),
    "a median": lambda x: x.median(1).values + x.median(1, keepdim=True).indices[:, 0] * x.median(-1).values[:, :1],
    "a power of a number": lambda x: 2**x + 0.3**x + torch.exp2(x) + 0.0 ** (x.abs() + 1),
    "a power of a value": lambda x: (x.abs() + 0.1) ** x,
    "hyperbolic functions": lambda x: (x / 4).cosh() + (x / 4).sinh() / 2,
    "logarithms": lambda x: (x.abs() + 0.1).log2() + (x.abs() + 0.1).log10(),
    "a border repeated on one axis": lambda x: functional.pad(x, (2, 1), mode="replicate") ** 2,
    "a border repeated on two axes": lambda x: functional.pad(x[:, None], (2, 0, 1, 3), mode="replicate") ** 2,
    "a border repeated on three axes": lambda x: (
        functional.pad(x.reshape(-1, 1, 2, 2, 6), (2, 1, 0, 3, 1, 1), mode="replicate") ** 2
    ),
    "a border cut off and another repeated": lambda x: functional.pad(x[:, None], (-1, 2, 1, -2), mode="replicate"),
    "the border of a single value": lambda x: functional.pad(x[:, :, :1], (3, 2), mode="replicate") ** 2,
    "distances": lambda x: torch.cdist(x, x.flip(1) * 2),
    "distances of a set to itself": lambda x: torch.cdist(x, x) * x[:, :, :1],
    "distances of examples to a table": lambda x: torch.cdist(x[:, 0], x[0].detach() * 2),
    "distances of a table to sums of absolute values": lambda x: (
        torch.cdist(x, x.mean(0, keepdim=True)[:, 1:], p=1) / 8
    ),
    "a Gaussian likelihood": lambda x: functional.gaussian_nll_loss(
        x[:, 0], x[:, 1], x[:, 2].relu(), full=True, reduction="none"
    ),
    "a Gaussian likelihood of a variance for each row": lambda x: functional.gaussian_nll_loss(
        x[:, 0], x[:, 1], x[:, 2, 0].abs() + 1, reduction="none"
    ),
    "a Gaussian likelihood of one variance": lambda x: functional.gaussian_nll_loss(x[:, 0], x[:, 1], 0.4, eps=1e-3),
    "cross-entropy over pixels": lambda x: functional.cross_entropy(
        x.reshape(-1, 4, 2, 3), x[:, :2, :3].abs().long().clamp(max=4), ignore_index=4, reduction="none"
    ),
    "softplus of a reversed value": lambda x: functional.softplus(x.flip(1)),
}


# So many functions are one graph: what is done once for a graph costs more than most functions.
TOGETHER = 10


def in_groups(functions):
    """Parameters: the functions by name, `TOGETHER` at a time."""
    names = list(functions)
    groups = [names[start : start + TOGETHER] for start in range(0, len(names), TOGETHER)]
    return [pytest.param({name: functions[name] for name in group}, id=f"{group[0]} and so on") for group in groups]


def gradients(functions, values):
    """Of each function of `x`, weighted by something smooth."""
    found = {}
    for name, function in functions.items():
        x = values["x"].detach().requires_grad_()
        out = function(x)
        found[name] = torch.autograd.grad((out * out.detach().cos()).sum(), x)[0]
    return found


@pytest.mark.parametrize("functions", in_groups(GRADIENTS))
def test_gradients_are_torchs(functions):
    session = onnxruntime.InferenceSession(to_onnx(capture(functools.partial(gradients, functions), [X])))
    x = np.random.default_rng(0).normal(size=(5, 4, 6)).astype(np.float32)
    expected = gradients(functions, {"x": torch.from_numpy(x)})
    for (name, value), found in zip(expected.items(), session.run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 20.0), (2.5, 5.0), (1.0, 200.0)])
def test_softplus_and_its_gradient_keep_their_digits_at_any_value(beta, threshold):
    def both(values):
        x = values["x"].detach().requires_grad_()
        out = functional.softplus(x, beta, threshold)
        return {"out": out.detach(), "gradient": torch.autograd.grad(out.sum(), x)[0]}

    x = np.concatenate([np.linspace(-30, 30, 601), [-100, -50, 50, 80, 100]]).astype(np.float32)
    session = onnxruntime.InferenceSession(to_onnx(capture(both, [Port("x", x.shape)])))
    wide = torch.from_numpy(x).double()
    for found, expected in zip(session.run(None, {"x": x}), both({"x": wide}).values(), strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=5e-6, atol=1e-37)


def test_log1p_keeps_the_digits_of_small_numbers_and_its_limits():
    x = np.array([-1, -0.5, -1e-7, 0, 1e-30, 6e-6, 0.1, 7, 1e30, np.inf], np.float32)
    session = onnxruntime.InferenceSession(to_onnx(capture(lambda v: {"out": v["x"].log1p()}, [Port("x", x.shape)])))
    expected = torch.from_numpy(x).double().log1p().numpy()
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", [torch.cosh, torch.sinh])
def test_hyperbolic_functions_keep_the_digits_of_small_and_large_numbers(function):
    x = np.concatenate([np.linspace(-80, 80, 400), np.linspace(-1, 1, 401), [1e-30, -1e-5, 3e-3]]).astype(np.float32)
    session = onnxruntime.InferenceSession(to_onnx(capture(lambda v: {"out": function(v["x"])}, [Port("x", x.shape)])))
    np.testing.assert_allclose(session.run(None, {"x": x})[0], function(torch.from_numpy(x).double()), rtol=1e-5)


def results(functions, values):
    return {name: function(values["x"], values["i"]) for name, function in functions.items()}


@pytest.mark.parametrize("functions", in_groups(FUNCTIONS))
def test_rules_compute_what_torch_computes(functions):
    session = onnxruntime.InferenceSession(to_onnx(capture(functools.partial(results, functions), [X, INDEX])))
    for batch in (2, 3, 11):
        random = np.random.default_rng(batch)
        feed = {"x": random.normal(size=(batch, 4, 6)).astype(np.float32), "i": random.integers(0, 4, (batch, 4))}
        wanted = {port.name for port in session.get_inputs()}
        outputs = session.run(None, {name: value for name, value in feed.items() if name in wanted})
        expected = results(functions, {name: torch.from_numpy(value) for name, value in feed.items()})
        for (name, value), found in zip(expected.items(), outputs, strict=True):
            assert (name, found.dtype, found.shape) == (name, value.numpy().dtype, tuple(value.shape))
            np.testing.assert_allclose(found, value.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_equal_operators_are_written_once_and_shapes_are_changed_once():
    def function(values):
        wide = values["x"].reshape(-1, 24)
        again = wide.reshape(-1, 6, 4).reshape(-1, 24)
        return {"out": (wide.sin() * again.sin()).unsqueeze(1).reshape(-1, 2, 12)}

    written = onnx.load_model_from_string(to_onnx(capture(function, [X])))
    kinds = [node.op_type for node in written.graph.node]
    assert kinds == ["Reshape", "Sin", "Mul", "Reshape", "Identity"]


def test_values_move_once_at_most_and_all_shapes_are_known():
    def function(values):
        x = values["x"]
        back = x.transpose(0, 1).transpose(0, 1)
        view = x.unsqueeze(1).transpose(1, 2).reshape(-1, 24)
        flat = x.transpose(0, 1).transpose(1, 2).reshape(24, -1).sin()
        moved = flat.reshape(4, 6, -1).permute(2, 0, 1).expand(x.shape)
        return {"out": back * moved + x[:, :1].expand(x.shape).cos() + view.exp().reshape(x.shape)}

    written = onnx.load_model_from_string(to_onnx(capture(function, [X])))
    kinds = collections.Counter(node.op_type for node in written.graph.node)
    assert (kinds["Transpose"], kinds["Reshape"], kinds["Expand"]) == (2, 4, 1)
    inferred = onnx.shape_inference.infer_shapes(written).graph.value_info
    sizes = {size.dim_param or size.dim_value for info in inferred for size in info.type.tensor_type.shape.dim}
    assert sizes - {1, 3, 4, 6, 24} == {"B"}, sizes


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, i: torch.addmm(x[0], x[0, :, :4], x[0], alpha=2.0), "alpha=2.0"),
        (lambda x, i: torch.add(x, x, alpha=3), "alpha=3"),
        (lambda x, i: x.scatter(1, i.unsqueeze(-1)[:, :1], x), "another shape than the indices"),
        (lambda x, i: functional.interpolate(x, 5, mode="area"), "interpolation by 'area'"),
        (lambda x, i: functional.embedding_bag(i[:, 0], x[0], i[:, 1]), "with offsets"),
        (lambda x, i: x.argmax().to(torch.float32), "over all axes"),
        (lambda x, i: i & (i + 1), "bitwise_and.* on integers"),
        (lambda x, i: i.to(torch.uint8) % -3, "the number -3 beside values of torch.uint8"),
        (lambda x, i: assigned(x, 0, 1.0), "a part of the batch"),
        (lambda x, i: assigned(x, x > 0, 1.0), "use torch.where"),
        (lambda x, i: functional.one_hot(i), "give it num_classes"),
        (lambda x, i: functional.instance_norm(x, x[0, :, 0], x[0, :, 0]), "track_running_stats"),
    ],
)
def test_what_a_rule_does_not_cover_is_refused_instead_of_written_wrong(function, words):
    with pytest.raises(UnsupportedOperator, match=words):
        to_onnx(capture(lambda values: {"out": function(values["x"], values["i"])}, [X, INDEX]))
