"""Backward operators written in forward ones, so that an inference runtime can train.

torch supplies most; convolution and max-pooling are ours. Each is checked against torch by tests/export.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

from export.errors import UnsupportedOperator

aten = torch.ops.aten


def convolution_backward(  # noqa: PLR0913, PLR0917, the operator's own signature
    grad_output: Tensor,
    inputs: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Input gradient as a transposed convolution, weight gradient as one GEMM over unfolded patches."""
    if transposed or groups != 1:
        raise UnsupportedOperator(
            f"gradient of a {'transposed' if transposed else f'grouped (groups={groups})'} convolution"
        )
    axes = [0, *range(2, inputs.dim())]
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        covered = [
            (out - 1) * step - 2 * pad + spread * (kernel - 1) + 1
            for out, step, pad, spread, kernel in zip(
                grad_output.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
            )
        ]
        missing = [size - have for size, have in zip(inputs.shape[2:], covered, strict=True)]
        grad_input = aten.convolution(grad_output, weight, None, stride, padding, dilation, True, missing, 1)
    if output_mask[1]:
        patches = _unfold(inputs, weight, grad_output, stride, padding, dilation)
        flat = grad_output.transpose(0, 1).reshape(weight.shape[0], -1) @ patches.t()
        channels_last = flat.reshape(weight.shape[0], *weight.shape[2:], weight.shape[1])
        grad_weight = channels_last.permute(0, channels_last.dim() - 1, *range(1, channels_last.dim() - 1))
    if output_mask[2]:
        grad_bias = grad_output.sum(axes)
    return grad_input, grad_weight, grad_bias


def _unfold(
    inputs: Tensor,
    weight: Tensor,
    output: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Every input value that each kernel tap meets: (taps·C, B·positions)."""
    pads = [side for pad in reversed(padding) for side in (pad, pad)]
    padded = torch.nn.functional.pad(inputs.transpose(0, 1), pads)
    taps = []
    for offsets in itertools.product(*(range(kernel) for kernel in weight.shape[2:])):
        view = padded
        for axis, (offset, step, spread) in enumerate(zip(offsets, stride, dilation, strict=True), start=2):
            start = offset * spread
            view = view[(slice(None),) * axis + (slice(start, start + (output.shape[axis] - 1) * step + 1, step),)]
        taps.append(view)
    return torch.cat(taps).reshape(len(taps) * inputs.shape[1], -1)


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
    """Add each gradient at the place its maximum came from."""
    batch, channels = inputs.shape[:2]
    zeros = torch.zeros_like(inputs).reshape(batch, channels, -1)
    summed = zeros.scatter_add(2, indices.reshape(batch, channels, -1), grad_output.reshape(batch, channels, -1))
    return summed.reshape(inputs.shape)


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
            aten._log_softmax,
            aten._log_softmax_backward_data,
            aten._softmax,
            aten._softmax_backward_data,
            aten.nll_loss_forward,
            aten.nll_loss_backward,
            aten.threshold_backward,
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
            aten.hardtanh_backward,
            aten.leaky_relu,
            aten.leaky_relu_backward,
            aten.softplus,
            aten.softplus_backward,
            aten.silu,
            aten.silu_backward,
        ]
    ),
    aten.var_mean.correction: var_mean,
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
}
