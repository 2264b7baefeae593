"""Backward operators written in forward ones, so that an inference runtime can train.

torch supplies most; the rest is ours. Each is checked against torch by tests/export.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

from export.convolution import convolution, convolution_backward
from export.errors import UnsupportedOperator

aten = torch.ops.aten


def max_pool2d_backward(  # noqa: PLR0913, PLR0917, the operator's own signature
    grad_output: Tensor,
    inputs: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Each gradient goes to the place its maximum came from; of equal ones, to the first."""
    size = inputs.shape[2:]
    tiles = list(stride or kernel_size) == list(kernel_size) and set(padding) == {0} and set(dilation) == {1}
    made = grad_output.shape[2:]
    if tiles and all(out * step <= length for out, step, length in zip(made, kernel_size, size, strict=True)):
        return _tiled_max_pool_backward(grad_output, inputs, kernel_size)
    batch, channels = inputs.shape[:2]
    zeros = torch.zeros_like(inputs).reshape(batch, channels, -1)
    summed = zeros.scatter_add(2, indices.reshape(batch, channels, -1), grad_output.reshape(batch, channels, -1))
    return summed.reshape(inputs.shape)


def _tiled_max_pool_backward(grad_output: Tensor, inputs: Tensor, kernel: Sequence[int]) -> Tensor:
    """Windows that do not overlap need no indices, which runtimes are slow to find: values are compared again."""
    rows, columns = (have * step for have, step in zip(grad_output.shape[2:], kernel, strict=True))
    taps = [
        inputs[:, :, down : rows : kernel[0], right : columns : kernel[1]]
        for down, right in itertools.product(range(kernel[0]), range(kernel[1]))
    ]
    largest = functools.reduce(torch.maximum, taps)
    left, parts = grad_output, []
    for tap in taps:
        parts.append(left * (tap == largest).to(left.dtype))
        left = left - parts[-1]
    spread = torch.stack(parts, -1).reshape(*grad_output.shape, *kernel)
    whole = spread.transpose(3, 4).reshape(*grad_output.shape[:2], rows, columns)
    return torch.nn.functional.pad(whole, (0, inputs.shape[3] - columns, 0, inputs.shape[2] - rows))


def threshold_backward(grad_output: Tensor, inputs: Tensor, threshold: float) -> Tensor:
    """A product where torch selects: four times as fast on ONNX Runtime."""
    return grad_output * (inputs > threshold).to(grad_output.dtype)


def hardtanh_backward(grad_output: Tensor, inputs: Tensor, low: float, high: float) -> Tensor:
    """As `threshold_backward`."""
    return grad_output * ((inputs > low) & (inputs < high)).to(grad_output.dtype)


def slice_backward(
    grad_output: Tensor, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    """Zeros before, between and after."""
    axis, size = dim % grad_output.dim(), input_sizes[dim]
    begin = start + size if start < 0 else start
    spread = grad_output.unsqueeze(axis + 1)
    if step > 1:
        spread = _pad_axis(spread, axis + 1, 0, step - 1)
    spread = spread.flatten(axis, axis + 1)
    if step > 1:  # the last place is followed by nothing of its own
        spread = spread.narrow(axis, 0, spread.shape[axis] - step + 1)
    return _pad_axis(spread, axis, begin, size - begin - spread.shape[axis])


def select_backward(grad_output: Tensor, input_sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """Zeros before and after."""
    axis, size = dim % len(input_sizes), input_sizes[dim]
    place = index % size
    return _pad_axis(grad_output.unsqueeze(axis), axis, place, size - place - 1)


def _pad_axis(values: Tensor, axis: int, before: int, after: int) -> Tensor:
    return torch.nn.functional.pad(values, [0, 0] * (values.dim() - axis - 1) + [before, after])


def embedding_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Add each gradient to the row that its index names."""
    if scale_grad_by_freq:
        raise UnsupportedOperator("an embedding with scale_grad_by_freq=True")
    rows, flat = indices.reshape(-1), grad_output.reshape(-1, grad_output.shape[-1])
    if padding_idx >= 0:
        flat = torch.where((rows == padding_idx).unsqueeze(1), 0.0, flat)
    return flat.new_zeros(num_weights, flat.shape[1]).index_put((rows,), flat, accumulate=True)


def var_mean(
    inputs: Tensor, dim: Sequence[int] | None = None, *, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean over axes, by their definition."""
    axes = list(range(inputs.dim())) if dim is None else list(dim)
    mean = inputs.mean(axes, keepdim=True)
    count = math.prod(inputs.shape[axis] for axis in axes)
    variance = ((inputs - mean) ** 2).sum(axes, keepdim=True) / (count - correction)
    return (variance, mean) if keepdim else (variance.squeeze(axes), mean.squeeze(axes))


TABLE: dict[Any, Callable[..., Any]] = {
    **core_aten_decompositions(),
    **get_decompositions(
        [
            aten._log_softmax_backward_data,
            aten._softmax_backward_data,
            aten.nll_loss_forward,
            aten.nll_loss_backward,
            aten.native_layer_norm,
            aten.native_layer_norm_backward,
            aten.native_group_norm,
            aten.native_group_norm_backward,
            aten.tanh_backward,
            aten.sigmoid_backward,
            aten.elu,
            aten.elu_backward,
            aten.gelu,
            aten.gelu_backward,
            aten.hardtanh,
            aten.leaky_relu,
            aten.leaky_relu_backward,
            aten.softplus,
            aten.softplus_backward,
            aten.silu,
            aten.silu_backward,
        ]
    ),
    aten.var_mean.correction: var_mean,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.copy.default: lambda into, source, non_blocking=False: source.to(into.dtype).expand(into.shape),
    aten.slice_backward.default: slice_backward,
    aten.select_backward.default: select_backward,
    aten.hardtanh_backward.default: hardtanh_backward,
    aten.threshold_backward.default: threshold_backward,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
}
