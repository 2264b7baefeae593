"""Forms to trace instead of operators for ExecuTorch: a table for `capture`.

XNNPACK has no comparisons, and sums fast over the middle axes of (N, H, W, C). The forms of normalisation and of the
gradients of activations follow from that. Shapes: N batch, C channels, G groups, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from export.decompositions import TABLE
from export.errors import UnsupportedOperator
from export.executorch import convolution as convolutions
from export.operator_forms import unrolled

# A sort compares each value with each.
MOST_SORTED = 1024


def _over_groups(x_NC: Tensor, groups: int) -> Tensor:
    """Sums over the channels of each group, at every channel."""
    sums = x_NC.reshape(x_NC.shape[0], groups, -1).sum(-1, keepdim=True)
    return sums.expand(-1, -1, x_NC.shape[1] // groups).reshape(x_NC.shape)


def _each_channel(x_NG: Tensor, channels: int) -> Tensor:
    """A number per group, at every channel."""
    return x_NG.unsqueeze(-1).expand(-1, -1, channels // x_NG.shape[1]).reshape(x_NG.shape[0], channels)


def _over_positions(x: Tensor) -> Tensor:
    """(N, *S, C) -> (N, C)."""
    return x.sum(list(range(1, x.dim() - 1)))


def _everywhere(x_NC: Tensor, like: Tensor) -> Tensor:
    """(N, C) -> (N, 1 …, C), which broadcasts to (N, *S, C)."""
    return x_NC.reshape(x_NC.shape[0], *(1 for _ in like.shape[1:-1]), x_NC.shape[1])


def group_norm(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics by sums over positions, which are fast, and then over the few channels of a group."""
    _, channels, positions, groups, epsilon = sizes
    x, count = convolutions.channels_last(inputs), positions * channels // groups
    mean_NC = _over_groups(_over_positions(x), groups) / count
    centred = x - _everywhere(mean_NC, x)
    rstd_NC = (_over_groups(_over_positions(centred * centred), groups) / count + epsilon).rsqrt()
    out = centred * _everywhere(rstd_NC if weight is None else rstd_NC * weight, x)
    out = out if bias is None else out + bias
    each = channels // groups
    return convolutions.channels_first(out), mean_NC[:, ::each], rstd_NC[:, ::each]


def group_norm_backward(
    grad_output: Tensor, inputs: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *sizes: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Two sums over positions give everything except the input's own gradient."""
    _, channels, positions, groups, output_mask = sizes
    grad, x = convolutions.channels_last(grad_output), convolutions.channels_last(inputs)
    rstd_NC = _each_channel(rstd, channels)
    centred = x - _everywhere(_each_channel(mean, channels), x)
    sums_NC, along_NC = _over_positions(grad), _over_positions(grad * centred) * rstd_NC
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        scale_NC = rstd_NC / (positions * channels // groups)
        weighted = [part if weight is None else part * weight for part in (sums_NC, along_NC)]
        level_NC, slope_NC = (_over_groups(part, groups) * scale_NC for part in weighted)
        gain_NC = rstd_NC if weight is None else rstd_NC * weight
        back = grad * _everywhere(gain_NC, x) - centred * _everywhere(slope_NC * rstd_NC, x)
        grad_input = convolutions.channels_first(back - _everywhere(level_NC, x))
    if output_mask[1]:
        grad_weight = along_NC.sum(0)
    if output_mask[2]:
        grad_bias = sums_NC.sum(0)
    return grad_input, grad_weight, grad_bias


def threshold_backward(grad_output: Tensor, inputs: Tensor, threshold: float) -> Tensor:
    """The gradient of ReLU, by arithmetic instead of a comparison and a choice."""
    return grad_output * convolutions.positive(inputs - threshold if threshold else inputs)


def hardtanh_backward(grad_output: Tensor, inputs: Tensor, low: float, high: float) -> Tensor:
    """The gradient of ReLU6 and its like."""
    return grad_output * (convolutions.positive(inputs - low if low else inputs) * convolutions.positive(high - inputs))


def log_softmax(inputs: Tensor, axis: int, half_to_float: bool) -> Tensor:
    """By its definition, as ExecuTorch's own kernel computes the exponentials one by one."""
    shifted = inputs - inputs.amax(axis, keepdim=True)
    return shifted - shifted.exp().sum(axis, keepdim=True).log()


def softmax(inputs: Tensor, axis: int, half_to_float: bool) -> Any:
    """XNNPACK's own along the last axis (NotImplemented); other axes are moved there."""
    last = inputs.dim() - 1
    if axis in {-1, last}:
        return NotImplemented
    return inputs.transpose(axis, last).softmax(last).transpose(axis, last)


def topk(inputs: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """The largest, one after the other: each is removed before the next search."""
    remaining, places = inputs if largest else -inputs, []
    for _ in range(k):
        places.append(remaining.argmax(dim, keepdim=True))
        remaining = remaining.scatter(dim, places[-1], -torch.inf)
    indices = torch.cat(places, dim)
    return inputs.gather(dim, indices), indices


def sort(
    inputs: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Every value's rank, by comparison with all others: the number of values before it; ties keep their order."""
    axis, count = dim % inputs.dim(), inputs.shape[dim]
    if count > MOST_SORTED:
        raise UnsupportedOperator(f"a sort of {count} values in ExecuTorch, which has none: take {MOST_SORTED} at most")
    x = inputs.movedim(axis, -1)
    column, row = x.unsqueeze(-1), x.unsqueeze(-2)
    earlier = torch.from_numpy(np.tri(count, k=-1, dtype=np.bool_))
    ranks = ((row > column if descending else row < column) | ((row == column) & earlier)).sum(-1)
    order = torch.arange(count).expand(x.shape)
    places = torch.zeros_like(ranks).scatter(-1, ranks, order).movedim(-1, axis)
    return inputs.gather(axis, places), places


def remainder(inputs: Tensor, other: Any) -> Any:
    """Of integers, the remainder of `//`: ExecuTorch's own has another sign. Otherwise unchanged (NotImplemented)."""
    if torch.result_type(inputs, other).is_floating_point:
        return NotImplemented
    return inputs - inputs // other * other


def constant_pad(inputs: Tensor, sides: Sequence[int], value: float = 0.0) -> Any:
    """Negative padding becomes a slice, as ExecuTorch's kernel refuses it. Otherwise unchanged (NotImplemented)."""
    if min(sides) >= 0:
        return NotImplemented
    for pair in range(len(sides) // 2):
        before, after = (max(-side, 0) for side in sides[2 * pair : 2 * pair + 2])
        axis = inputs.dim() - 1 - pair
        inputs = inputs.narrow(axis, before, inputs.shape[axis] - before - after)
    added = [max(side, 0) for side in sides]
    return convolutions.aten.constant_pad_nd(inputs, added, value) if any(added) else inputs


FORMS: dict[Any, Callable[..., Any]] = {
    **TABLE,
    unrolled: unrolled,  # a program has no loops
    convolutions.aten._log_softmax.default: log_softmax,
    convolutions.aten._softmax.default: softmax,
    convolutions.aten.constant_pad_nd.default: constant_pad,
    convolutions.aten.convolution.default: convolutions.convolution,
    convolutions.aten.convolution_backward.default: convolutions.convolution_backward,
    convolutions.aten.max_pool2d_with_indices.default: convolutions.max_pool2d,
    convolutions.aten.max_pool2d_with_indices_backward.default: convolutions.max_pool2d_backward,
    convolutions.aten.native_group_norm.default: group_norm,
    convolutions.aten.native_group_norm_backward.default: group_norm_backward,
    **dict.fromkeys([convolutions.aten.remainder.Scalar, convolutions.aten.remainder.Tensor], remainder),
    **dict.fromkeys([convolutions.aten.sort.default, convolutions.aten.sort.stable], sort),
    convolutions.aten.threshold_backward.default: threshold_backward,
    convolutions.aten.topk.default: topk,
    convolutions.aten.hardtanh_backward.default: hardtanh_backward,
}
