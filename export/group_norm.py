"""Group normalisation in few operators, with statistics by sums, so that the gradient rarely reads the large arrays.

Shapes: B batch, C channels, G groups, S positions of a channel; values are seen as (B, G, C / G, S).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def group_norm(  # noqa: PLR0913, PLR0917, the operator's own signature
    inputs: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    positions: int,
    groups: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten.native_group_norm`: the normalised values, and mean and 1 / deviation of each group (B, G)."""
    x = _by_group(inputs, groups)
    mean = x.mean((2, 3), keepdim=True)
    centred = x - mean
    rstd = ((centred * centred).mean((2, 3), keepdim=True) + epsilon).rsqrt()
    out = centred * (rstd if weight is None else rstd * _each_channel(weight, groups))
    out = out if bias is None else out + _each_channel(bias, groups)
    return out.reshape(inputs.shape), mean.squeeze((2, 3)), rstd.squeeze((2, 3))


def group_norm_backward(  # noqa: PLR0913, PLR0917, the operator's own signature
    grad_output: Tensor,
    inputs: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    batch: int,
    channels: int,
    positions: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, by two sums over positions."""
    grad, x = _by_group(grad_output, groups), _by_group(inputs, groups)
    rstd = rstd[:, :, None, None]
    centred = x - mean[:, :, None, None]
    sums, along = grad.sum(3, keepdim=True), (grad * centred).sum(3, keepdim=True) * rstd
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        gain = rstd if weight is None else rstd * _each_channel(weight, groups)
        share = gain * (groups / (positions * channels))
        level, slope = ((share * part).sum(2, keepdim=True) for part in (sums, along))
        grad_input = (grad * gain - centred * (slope * rstd) - level).reshape(inputs.shape)
    if output_mask[1]:
        grad_weight = along.sum(0).reshape(channels)
    if output_mask[2]:
        grad_bias = sums.sum(0).reshape(channels)
    return grad_input, grad_weight, grad_bias


def _by_group(values: Tensor, groups: int) -> Tensor:
    batch, channels, *positions = values.shape
    return values.reshape(batch, groups, channels // groups, math.prod(positions))


def _each_channel(values: Tensor, groups: int) -> Tensor:
    """(C,) -> (G, C / G, 1), which broadcasts to all positions."""
    return values.reshape(groups, -1, 1)
