"""Forms to trace instead of operators for ExecuTorch, convolution and pooling among them: a table for `capture`.

XNNPACK has no comparisons, and sums fast over the middle axes of (N, H, W, C). The forms of normalisation and of the
gradients of activations follow from that. Shapes: N batch, C channels, G groups, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from export.convolution import Window, is_depthwise, rows_of, transposed_backward
from export.decompositions import TABLE
from export.errors import UnsupportedOperator
from export.operator_forms import unrolled

# Convolution and max-pooling, and their gradients, in forms that are fast in ExecuTorch.
#
# Weights are inputs of a graph, and XNNPACK's convolutions need constants. Its matrix product takes any operands and is
# as fast as torch's, so a convolution becomes a gather of patches and a product. Values are channels-last inside, so
# that patches are runs of memory.
#
# Figures: docs/decisions/0011-executorch.md. Shapes: N batch, C channels, O channels out, G groups, S positions, K
# taps.


aten = torch.ops.aten


def channels_last(x: Tensor) -> Tensor:
    """(N, C, *S) -> (N, *S, C)."""
    return x.permute(0, *range(2, x.dim()), 1)


def channels_first(x: Tensor) -> Tensor:
    """(N, *S, C) -> (N, C, *S). Contiguous, because torch gives other operators to memory that is channels-last."""
    return x.permute(0, x.dim() - 1, *range(1, x.dim() - 1)).contiguous()


def gather(x: Tensor, sizes: Sequence[int], strides: Sequence[int], start: int) -> Tensor:
    """A strided view as a copy. Says contiguous first, because strides count elements of contiguous memory."""
    gathered: Tensor = aten.as_strided_copy(x.contiguous(), sizes, strides, start)
    return gathered


def steps(sizes: Sequence[int]) -> list[int]:
    """Strides of contiguous memory."""
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def patches(x: Tensor, window: Window, fill: float = 0.0) -> Tensor:
    """(N, *S, C) -> the values under the kernel at each position of the result: (N, *S', K, C)."""
    outputs = window.outputs(x.shape[1:-1])
    if window.trivial:
        return x.unsqueeze(-2)
    if any(window.padding):
        x = aten.constant_pad_nd(x, [0, 0, *(pad for pad in reversed(window.padding) for _ in range(2))], fill)
    step = steps(x.shape)
    inner = [s * spread for s, spread in zip(step[1:-1], window.dilation, strict=True)]
    outer = [s * stride for s, stride in zip(step[1:-1], window.stride, strict=True)]
    sizes, strides = [*window.kernel, x.shape[-1]], [*inner, 1]
    if window.dilation[-1] == 1:  # neighbours in memory: one run is faster than several
        sizes, strides = [*window.kernel[:-1], window.kernel[-1] * x.shape[-1]], [*inner[:-1], 1]
    met = gather(x, [x.shape[0], *outputs, *sizes], [step[0], *outer, *strides], 0)
    return met.reshape(x.shape[0], *outputs, window.taps, x.shape[-1])


def unpatched(met: Tensor, window: Window, sizes: Sequence[int]) -> Tensor:
    """The transpose of `patches`: (N, *S', K, C) summed where patches overlap -> (N, *S, C)."""
    if window.trivial:
        return met.squeeze(-2)
    if window.tiles:
        return _side_by_side(met, window, sizes)
    met = _spread(met, window.stride)
    # Zeros on both sides, so that every position has a value for every tap.
    low = [reach - pad for reach, pad in zip(window.reach, window.padding, strict=True)]
    high = [size - 1 + pad - (have - 1) for size, pad, have in zip(sizes, window.padding, met.shape[1:-2], strict=True)]
    offsets = [max(0, -room) for room in low]
    pads = [side for pair in zip(low, high, strict=True) for side in (max(0, room) for room in pair)]
    met = aten.constant_pad_nd(met, [0, 0, 0, 0, *_reversed_pairs(pads)], 0.0)
    step = steps(met.shape)
    channels, taps = met.shape[-1], steps((*window.kernel, met.shape[-1]))
    # Position y takes tap i from place y + padding - i * dilation. With the last tap first no stride is negative.
    start = (window.taps - 1) * channels + sum(o * s for o, s in zip(offsets, step[1:-2], strict=True))
    inner = [s * d - t for s, d, t in zip(step[1:-2], window.dilation, taps[:-1], strict=True)]
    shape = [met.shape[0], *sizes, *window.kernel, channels]
    terms = gather(met, shape, [step[0], *step[1:-2], *inner, 1], start)
    return _tapwise(terms.flatten(-len(sizes) - 1, -2)).sum(1).reshape(met.shape[0], *sizes, channels)


def _reversed_pairs(pads: Sequence[int]) -> list[int]:
    """torch pads the last axis first."""
    return [side for axis in reversed(range(len(pads) // 2)) for side in pads[2 * axis : 2 * axis + 2]]


def _spread(x: Tensor, stride: Sequence[int]) -> Tensor:
    """(N, *S, K, C) with stride - 1 zeros between positions."""
    if set(stride) == {1}:
        return x
    spatial = x.shape[1:-2]
    apart = x.reshape(
        x.shape[0], *(size for pair in zip(spatial, [1] * len(spatial), strict=True) for size in pair), -1
    )
    pads = [side for step in reversed(stride) for side in (0, step - 1, 0, 0)]
    padded: Tensor = aten.constant_pad_nd(apart, [0, 0, *pads], 0.0)
    return padded.reshape(x.shape[0], *(a * b for a, b in zip(spatial, stride, strict=True)), *x.shape[-2:])


def _side_by_side(met: Tensor, window: Window, sizes: Sequence[int]) -> Tensor:
    axes, outputs = len(sizes), met.shape[1:-2]
    apart = met.reshape(met.shape[0], *outputs, *window.kernel, met.shape[-1])
    order = [axis for pair in zip(range(1, axes + 1), range(axes + 1, 2 * axes + 1), strict=True) for axis in pair]
    covered = [out * taps for out, taps in zip(outputs, window.kernel, strict=True)]
    whole = apart.permute(0, *order, 2 * axes + 1).reshape(met.shape[0], *covered, met.shape[-1])
    missing = [side for size, have in zip(sizes, covered, strict=True) for side in (0, size - have)]
    padded: Tensor = aten.constant_pad_nd(whole, [0, 0, *_reversed_pairs(missing)], 0.0) if any(missing) else whole
    return padded


def convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    """Patches times weights; if transposed, the input gradient of an ordinary convolution. how: as the operator has."""
    *slide, transposed, output_padding, groups = how
    window = Window.of(weight.shape[2:], *slide)
    if transposed:
        sizes = window.inputs(inputs.shape[2:], output_padding)
        result = _input_gradient(channels_last(inputs), weight, window, sizes, groups)
        return channels_first(result if bias is None else result + bias)
    met = patches(channels_last(inputs), window)
    if groups == 1:
        flat, matrix = met.reshape(-1, met.shape[-1] * window.taps), rows_of(weight).t()
        result = flat @ matrix if bias is None else aten.addmm(bias, flat, matrix)
    else:
        if is_depthwise(weight, groups):
            result = (_tapwise(met) * _tapwise(rows_of(weight).t())).sum(1).flatten(1)
        else:
            result = (_grouped(met, groups) @ _group_matrices(weight, groups)).transpose(0, 1).flatten(1)
        result = result if bias is None else result + bias
    return channels_first(result.reshape(*met.shape[:-2], -1))


def convolution_backward(
    grad_output: Tensor, inputs: Tensor, weight: Tensor, _: Any, *how: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias. how: as the operator has it, with the mask of those that are wanted."""
    *slide, transposed, _, groups, output_mask = how
    if transposed:
        return transposed_backward(grad_output, inputs, weight, slide, groups)
    window = Window.of(weight.shape[2:], *slide)
    grad = channels_last(grad_output)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_input = channels_first(_input_gradient(grad, weight, window, inputs.shape[2:], groups))
    if output_mask[1]:
        rows = _weight_gradient(grad, patches(channels_last(inputs), window), weight, groups)
        grad_weight = channels_first(rows.reshape(weight.shape[0], *weight.shape[2:], -1))
    if output_mask[2]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_input, grad_weight, grad_bias


def _weight_gradient(grad: Tensor, met: Tensor, weight: Tensor, groups: int) -> Tensor:
    """In the order of `rows_of`: channels out, taps, channels of a group."""
    if groups == 1:
        return grad.reshape(-1, grad.shape[-1]).t() @ met.reshape(-1, met.shape[-2] * met.shape[-1])
    if is_depthwise(weight, groups):
        products = _tapwise(met) * grad.reshape(-1, 1, 1, grad.shape[-1])
        return products.sum(0).reshape(met.shape[-2], met.shape[-1]).t()
    return _grouped(grad.unsqueeze(-2), groups).transpose(1, 2) @ _grouped(met, groups)


def _input_gradient(grad: Tensor, weight: Tensor, window: Window, sizes: Sequence[int], groups: int) -> Tensor:
    """(N, *S', O) -> (N, *S, C)."""
    if groups == 1:
        return _dense_input_gradient(grad, weight, window, sizes)
    if is_depthwise(weight, groups):
        met = grad.reshape(-1, 1, 1, grad.shape[-1]) * _tapwise(rows_of(weight).t())
    else:
        products = _grouped(grad.unsqueeze(-2), groups) @ _group_matrices(weight, groups).transpose(1, 2)
        met = products.reshape(*products.shape[:2], window.taps, -1).permute(1, 2, 0, 3)
    return unpatched(met.reshape(*grad.shape[:-1], window.taps, -1), window, sizes)


def _dense_input_gradient(grad: Tensor, weight: Tensor, window: Window, sizes: Sequence[int]) -> Tensor:
    """Patches of the gradient times the reversed kernel; if weights are larger, the transpose of that."""
    outside = tuple(reach - pad for reach, pad in zip(window.reach, window.padding, strict=True))
    turned = set(window.stride) == {1} and min(outside) >= 0 and not window.trivial
    if not turned or grad.shape[0] * math.prod(sizes) < 2 * weight.shape[0]:
        met = grad.reshape(-1, grad.shape[-1]) @ rows_of(weight)
        return unpatched(met.reshape(*grad.shape[:-1], window.taps, -1), window, sizes)
    rows = weight.permute(*range(2, weight.dim()), 0, 1).reshape(window.taps, -1)
    # The taps backwards, by a look-up in a table: it copies whole rows.
    backwards: Tensor = aten.embedding(rows, torch.arange(window.taps - 1, -1, -1))
    met = patches(grad, Window(window.kernel, window.stride, outside, window.dilation))
    flat = met.reshape(-1, window.taps * grad.shape[-1]) @ backwards.reshape(-1, weight.shape[1])
    return flat.reshape(grad.shape[0], *sizes, weight.shape[1])


def _tapwise(x: Tensor) -> Tensor:
    """(…, K, C) -> (rest, K, 1, C): XNNPACK sums this over K without moving it."""
    return x.reshape(-1, x.shape[-2], 1, x.shape[-1])


def _grouped(met: Tensor, groups: int) -> Tensor:
    """(N, *S, K, C) -> (G, N·S, K·C/G)."""
    apart = met.reshape(-1, met.shape[-2], groups, met.shape[-1] // groups)
    return apart.permute(2, 0, 1, 3).flatten(2)


def _group_matrices(weight: Tensor, groups: int) -> Tensor:
    """(O, C/G, *kernel) -> (G, K·C/G, O/G)."""
    return rows_of(weight).reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)


def positive(x: Tensor) -> Tensor:
    """1 where x > 0, else 0, in arithmetic that XNNPACK has."""
    return x.clamp(0.0, 1.0).ceil()


def _first_largest(met: Tensor) -> tuple[Tensor, Tensor]:
    """Of (N, *S, K, C): the largest along K, and 1 at its first place, else 0."""
    taps = met.unbind(-2)
    largest = taps[0]
    for tap in taps[1:]:
        largest = torch.maximum(largest, tap)
    chosen = [1 - positive(largest - taps[0])]
    free = 1 - chosen[0]
    for tap in taps[1:]:
        chosen.append(free * (1 - positive(largest - tap)))
        free = free - chosen[-1]
    return largest, torch.stack(chosen, -2)


def max_pool2d(
    inputs: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """By comparisons. ExecuTorch's own backward kernel would need the indices, and is wrong."""
    window = Window.pool(kernel_size, stride, padding, dilation)
    hung = _overhung(inputs, window, ceil_mode)
    largest, chosen = _first_largest(patches(channels_last(hung), window, -torch.inf))
    return channels_first(largest), channels_first(_places(chosen, inputs, window, ceil_mode))


def _overhung(x: Tensor, window: Window, ceil_mode: bool, fill: float = -torch.inf) -> Tensor:
    """(N, C, H, W), padded at the end for the last windows of `ceil_mode`."""
    down, right = window.overhang(x.shape[2:]) if ceil_mode else (0, 0)
    padded: Tensor = aten.constant_pad_nd(x, [0, right, 0, down], fill) if down or right else x
    return padded


def _places(chosen: Tensor, inputs: Tensor, window: Window, ceil_mode: bool) -> Tensor:
    """The index of each chosen value in its plane. It is exported only if something uses it, which is rare."""
    height, width = inputs.shape[2:]
    rows, columns = torch.arange(height).reshape(1, 1, -1, 1), torch.arange(width).reshape(1, 1, 1, -1)
    places = (rows * width + columns).to(torch.float32)
    met = patches(channels_last(_overhung(places, window, ceil_mode, 0.0)), window)
    return (chosen * met).sum(-2).to(torch.int64)


def max_pool2d_backward(grad_output: Tensor, inputs: Tensor, *pool: Any) -> Tensor:
    """The gradient goes to the first of the largest, as in torch.

    pool: kernel, stride, padding, dilation, ceil_mode and indices, as the operator has them.
    """
    *sizes, ceil_mode, _ = pool
    window = Window.pool(*sizes)
    hung = _overhung(inputs, window, ceil_mode)
    _, chosen = _first_largest(patches(channels_last(hung), window, -torch.inf))
    met = chosen * channels_last(grad_output).unsqueeze(-2)
    back = channels_first(unpatched(met, window, hung.shape[2:]))
    return back[:, :, : inputs.shape[2], : inputs.shape[3]] if ceil_mode else back


# Forms to trace instead of operators for ExecuTorch: a table for `capture`.


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
    x, count = channels_last(inputs), positions * channels // groups
    mean_NC = _over_groups(_over_positions(x), groups) / count
    centred = x - _everywhere(mean_NC, x)
    rstd_NC = (_over_groups(_over_positions(centred * centred), groups) / count + epsilon).rsqrt()
    out = centred * _everywhere(rstd_NC if weight is None else rstd_NC * weight, x)
    out = out if bias is None else out + bias
    each = channels // groups
    return channels_first(out), mean_NC[:, ::each], rstd_NC[:, ::each]


def group_norm_backward(
    grad_output: Tensor, inputs: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *sizes: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Two sums over positions give everything except the input's own gradient."""
    _, channels, positions, groups, output_mask = sizes
    grad, x = channels_last(grad_output), channels_last(inputs)
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
        grad_input = channels_first(back - _everywhere(level_NC, x))
    if output_mask[1]:
        grad_weight = along_NC.sum(0)
    if output_mask[2]:
        grad_bias = sums_NC.sum(0)
    return grad_input, grad_weight, grad_bias


def threshold_backward(grad_output: Tensor, inputs: Tensor, threshold: float) -> Tensor:
    """The gradient of ReLU, by arithmetic instead of a comparison and a choice."""
    return grad_output * positive(inputs - threshold if threshold else inputs)


def hardtanh_backward(grad_output: Tensor, inputs: Tensor, low: float, high: float) -> Tensor:
    """The gradient of ReLU6 and its like."""
    return grad_output * (positive(inputs - low if low else inputs) * positive(high - inputs))


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
    return aten.constant_pad_nd(inputs, added, value) if any(added) else inputs


FORMS: dict[Any, Callable[..., Any]] = {
    **TABLE,
    unrolled: unrolled,  # a program has no loops
    aten._log_softmax.default: log_softmax,
    aten._softmax.default: softmax,
    aten.constant_pad_nd.default: constant_pad,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices.default: max_pool2d,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    **dict.fromkeys([aten.remainder.Scalar, aten.remainder.Tensor], remainder),
    **dict.fromkeys([aten.sort.default, aten.sort.stable], sort),
    aten.threshold_backward.default: threshold_backward,
    aten.topk.default: topk,
    aten.hardtanh_backward.default: hardtanh_backward,
}
