"""Gradients by Winograd's algorithm are those of the layers, up to round-off."""

import pytest
import torch
from torch.nn import functional

from simulator.engines.recorded.program import Program, Workspace
from simulator.engines.recorded.recording import record

CPU = torch.device("cpu")
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
