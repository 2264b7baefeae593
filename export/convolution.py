"""Convolutions, windows, pools and interpolation, and their gradients, in forms that are fast on a device.

Weights are inputs of a graph, so no runtime can repack them ahead of time. On large images the runtime's own
convolution is good. On small ones it computes a tiny product per image, so a product over the whole batch is better.
Grouped convolutions are slow everywhere. A 3×3 convolution 512→512 on 3×3 images takes 9 ms as a product, else 14.5.

Shapes: B batch, C channels in, O channels out, K kernel taps, P places of one image.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from export.errors import UnsupportedOperator


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding kernel; every field has a number per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @staticmethod
    def of(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Window:
        """A window from torch's arguments, where one number means all axes, and no stride the kernel's size."""
        axes = len(kernel)
        options = (stride or kernel, padding, dilation)
        return Window(tuple(kernel), *(tuple(part) * (axes // len(part)) for part in options))

    @staticmethod
    def pool(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Window:
        """The window of a pool over two axes, where torch may give the kernel as one number."""
        return Window.of(tuple(kernel) * (2 // len(kernel)), stride, padding, dilation)

    @property
    def reach(self) -> tuple[int, ...]:
        """From the first to the last position under the kernel."""
        return tuple(spread * (taps - 1) for spread, taps in zip(self.dilation, self.kernel, strict=True))

    @property
    def taps(self) -> int:
        """The number of positions under the kernel."""
        return math.prod(self.kernel)

    @property
    def offsets(self) -> Iterator[tuple[int, ...]]:
        """Every tap by its place in the kernel."""
        return itertools.product(*map(range, self.kernel))

    def outputs(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The spatial sizes of the result."""
        each = zip(sizes, self.padding, self.reach, self.stride, strict=True)
        return tuple((size + 2 * pad - reach - 1) // step + 1 for size, pad, reach, step in each)

    def inputs(self, sizes: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
        """The smallest spatial sizes whose `outputs` are `sizes`, and `more` on each axis."""
        each = zip(sizes, self.padding, self.reach, self.stride, more, strict=True)
        return tuple((size - 1) * step - 2 * pad + reach + 1 + extra for size, pad, reach, step, extra in each)

    def overhang(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The padding that `ceil_mode` adds: the part of one more window, begun inside, that is past the end."""
        missing = []
        for size, pad, reach, step in zip(sizes, self.padding, self.reach, self.stride, strict=True):
            rest = (size + 2 * pad - reach - 1) % step
            begins = size + 2 * pad - reach - 1 - rest + step
            missing.append(step - rest if rest and begins < size + pad else 0)
        return tuple(missing)

    @property
    def trivial(self) -> bool:
        """Every position is its own patch."""
        return self.taps == 1 and set(self.stride) == {1} and set(self.padding) == {0}

    @property
    def tiles(self) -> bool:
        """Patches lie side by side."""
        return self.stride == self.kernel and set(self.padding) == {0} and set(self.dilation) == {1}


aten = torch.ops.aten
# Images of so many places at most are convolved as one matrix product over the batch, by kernels of so many weights at
# least: below that, moving values about costs more than the product.
SMALL, LARGE = 64, 1 << 14


def convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Any:
    """A product over the whole batch if images are small; else the runtime's own operator (NotImplemented).

    how: stride, padding, dilation, whether it is transposed, output padding and groups, as the operator has them.
    """
    *slide, transposed, _, groups = how
    window = Window.of(weight.shape[2:], *slide)
    if transposed or math.prod(inputs.shape[2:]) > SMALL:
        return NotImplemented
    if groups == 1 and weight.numel() >= LARGE:
        size = window.outputs(inputs.shape[2:])
        flat = rows_of(weight) @ _patches(inputs, size, window)
        result = flat.reshape(weight.shape[0], inputs.shape[0], *size).transpose(0, 1)
    elif is_depthwise(weight, groups):
        result = _depthwise_small(inputs, weight, window)
    else:
        return NotImplemented
    return result if bias is None else result + bias.reshape(-1, *(1 for _ in window.stride))


def convolution_backward(
    grad_output: Tensor, inputs: Tensor, weight: Tensor, _: Any, *how: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias. how: as the operator has it, with the mask of those that are wanted."""
    *slide, transposed, _, groups, output_mask = how
    if transposed:
        return transposed_backward(grad_output, inputs, weight, slide, groups)
    window = Window.of(weight.shape[2:], *slide)
    grad_input = _input_gradient(grad_output, inputs, weight, window, groups) if output_mask[0] else None
    grad_weight = _weight_gradient(grad_output, inputs, weight, window, groups) if output_mask[1] else None
    grad_bias = grad_output.sum([0, *range(2, inputs.dim())]) if output_mask[2] else None
    return grad_input, grad_weight, grad_bias


def transposed_backward(
    grad_output: Tensor, inputs: Tensor, weight: Tensor, slide: Sequence[Sequence[int]], groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a transposed convolution: those of the underlying convolution, with roles exchanged.

    slide: stride, padding and dilation.
    """
    plain = (*slide, False, [0] * len(slide[0]), groups)
    grad_input = aten.convolution(grad_output, weight, None, *plain)
    mask = [False, True, False]
    grad_weight = aten.convolution_backward(inputs, grad_output, weight, None, *plain, mask)[1]
    return grad_input, grad_weight, grad_output.sum([0, *range(2, inputs.dim())])


def _input_gradient(grad: Tensor, inputs: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    small = math.prod(inputs.shape[2:]) <= SMALL
    if small and is_depthwise(weight, groups):
        places = _by_channel(grad) @ _matrices(weight, inputs, grad, window).transpose(1, 2)
        return places.reshape(*inputs.shape[1::-1], *inputs.shape[2:]).transpose(0, 1)
    back = tuple(reach - pad for reach, pad in zip(window.reach, window.padding, strict=True))
    if small and groups == 1 and weight.numel() >= LARGE and set(window.stride) == {1} and min(back) >= 0:
        # A convolution with the kernel turned round: its taps are met in the opposite order.
        whole = Window(window.kernel, window.stride, back, window.dilation)
        patches = _patches(grad, inputs.shape[2:], whole, backwards=True)
        flat = rows_of(weight.transpose(0, 1)) @ patches
        return flat.reshape(weight.shape[1], inputs.shape[0], *inputs.shape[2:]).transpose(0, 1)
    covered = [
        (out - 1) * step - 2 * pad + far + 1
        for out, step, pad, far in zip(grad.shape[2:], window.stride, window.padding, window.reach, strict=True)
    ]
    missing = [size - have for size, have in zip(inputs.shape[2:], covered, strict=True)]
    result: Tensor = aten.convolution(
        grad, weight, None, window.stride, window.padding, window.dilation, True, missing, groups
    )
    return result


def _weight_gradient(grad: Tensor, inputs: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    if groups == 1:
        flat = grad.transpose(0, 1).reshape(weight.shape[0], -1) @ _patches(inputs, grad.shape[2:], window).t()
        return _from_rows(flat, weight)
    if not is_depthwise(weight, groups):
        return _grouped_weight_gradient(grad, inputs, weight, window, groups)
    if math.prod(inputs.shape[2:]) <= SMALL:
        matrices = _by_channel(inputs).transpose(1, 2) @ _by_channel(grad)
        taps = matrices.flatten(1) @ _meetings(inputs, grad, window).t()
        return taps.reshape(weight.shape)
    if set(window.stride) == {1}:
        return _flat_weight_gradient(grad, inputs, weight, window)
    each = [0, *range(2, grad.dim())]
    products = [(tap * grad).sum(each, keepdim=True) for tap in _taps(inputs, grad.shape[2:], window)]
    return torch.cat(products, 2).reshape(weight.shape)


def _flat_weight_gradient(grad: Tensor, inputs: Tensor, weight: Tensor, window: Window) -> Tensor:
    """Each tap reads one run of memory: if gradients are laid out like the padded image, a tap is a shift."""
    pads = [side for pad in reversed(window.padding) for side in (pad, pad)]
    padded = torch.nn.functional.pad(inputs, pads)
    space = padded.shape[2:]
    margins = [part for size, out in zip(space, grad.shape[2:], strict=True) for part in (size - out, 0)]
    spread = torch.nn.functional.pad(grad, margins[::-1]).flatten(2)
    steps = [math.prod(space[axis + 1 :]) * spread for axis, spread in enumerate(window.dilation)]
    shifts = [sum(offset * step for offset, step in zip(tap, steps, strict=True)) for tap in window.offsets]
    flat = torch.nn.functional.pad(padded.flatten(2), (0, shifts[-1]))
    length = spread.shape[2]
    products = [(flat[..., shift : shift + length] * spread).sum([0, 2], keepdim=True) for shift in shifts]
    return torch.cat(products, 2).reshape(weight.shape)


def _grouped_weight_gradient(grad: Tensor, inputs: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """A batched product, one for each group."""
    inside, outside = weight.shape[1], weight.shape[0] // groups
    taps = list(_taps(inputs.transpose(0, 1), grad.shape[2:], window))
    patches = torch.stack(taps).reshape(len(taps), groups, inside, -1).transpose(0, 1).flatten(1, 2)
    flat = grad.transpose(0, 1).reshape(groups, outside, -1) @ patches.transpose(1, 2)
    return _from_rows(flat.reshape(groups * outside, -1), weight)


def _patches(inputs: Tensor, size: Sequence[int], window: Window, *, backwards: bool = False) -> Tensor:
    """Every input value that each kernel tap meets: (K·C, B·P); `backwards` begins with the last tap."""
    taps = list(_taps(inputs.transpose(0, 1), size, window))[:: -1 if backwards else 1]
    return (torch.cat(taps) if len(taps) > 1 else taps[0]).reshape(len(taps) * inputs.shape[1], -1)


def _taps(inputs: Tensor, size: Sequence[int], window: Window) -> Iterator[Tensor]:
    """For each kernel tap, the input values that it meets; axes before the image's stay as they are."""
    pads = [side for pad in reversed(window.padding) for side in (pad, pad)]
    padded = torch.nn.functional.pad(inputs, pads) if any(pads) else inputs
    for offsets in window.offsets:
        view = padded
        for axis, (offset, step, spread) in enumerate(zip(offsets, window.stride, window.dilation, strict=True), 2):
            start, stop = offset * spread, offset * spread + (size[axis - 2] - 1) * step + 1
            if (start, stop, step) != (0, view.shape[axis], 1):
                view = view[(slice(None),) * axis + (slice(start, stop, step),)]
        yield view


def rows_of(weight: Tensor) -> Tensor:
    """A kernel (O, C, …) as a matrix (O, K·C), in the order of `_patches`."""
    return weight.permute(0, *range(2, weight.dim()), 1).reshape(weight.shape[0], -1)


def _from_rows(flat: Tensor, weight: Tensor) -> Tensor:
    """The inverse of `rows_of`."""
    channels_last = flat.reshape(weight.shape[0], *weight.shape[2:], weight.shape[1])
    return channels_last.permute(0, channels_last.dim() - 1, *range(1, channels_last.dim() - 1))


def is_depthwise(weight: Tensor, groups: int) -> bool:
    """Whether every channel is convolved separately, into one channel."""
    return weight.shape[0] == groups and weight.shape[1] == 1


def _depthwise_small(inputs: Tensor, weight: Tensor, window: Window) -> Tensor:
    """One matrix product for each channel."""
    size = window.outputs(inputs.shape[2:])
    grad_like = inputs.new_empty((1, 1, *size))
    flat = _by_channel(inputs) @ _matrices(weight, inputs, grad_like, window)
    return flat.reshape(*inputs.shape[1::-1], *size).transpose(0, 1)


def _by_channel(images: Tensor) -> Tensor:
    """Images (B, C, …) as (C, B, P)."""
    return images.transpose(0, 1).flatten(2)


def _matrices(weight: Tensor, inputs: Tensor, output: Tensor, window: Window) -> Tensor:
    """Each channel's convolution as a matrix from input places to output places: (C, P in, P out)."""
    places = math.prod(inputs.shape[2:]), math.prod(output.shape[2:])
    return (weight.flatten(1) @ _meetings(inputs, output, window)).reshape(-1, *places)


def _meetings(inputs: Tensor, output: Tensor, window: Window) -> Tensor:
    """A constant of zeros and ones, (K, P in · P out): 1 where a tap maps an input place to an output place."""
    size, out_shape = inputs.shape[2:], output.shape[2:]
    places = np.arange(math.prod(size)).reshape(size)
    grid = np.pad(places, [(pad, pad) for pad in window.padding], constant_values=-1)
    meets = np.zeros((window.taps, places.size, math.prod(out_shape)), np.float32)
    for tap, offsets in enumerate(window.offsets):
        met = tuple(
            slice(offset * spread, offset * spread + (out - 1) * step + 1, step)
            for offset, spread, out, step in zip(offsets, window.dilation, out_shape, window.stride, strict=True)
        )
        source = grid[met].ravel()
        real = np.flatnonzero(source >= 0)
        meets[tap, source[real], real] = 1
    return torch.from_numpy(meets.reshape(len(meets), -1)).to(inputs.dtype)


# Pools, interpolation and similar in operators that every runtime has: sums of slices, and constant matrices.
#
# Each of them works on one axis after the other. The constants are made with NumPy, so that a trace sees constants.


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """A number per axis, where torch accepts one for all."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * (axes // len(numbers))


def avg_pool(axes: int) -> Callable[..., Tensor]:
    """Average pooling over the last axes: a mean where windows lie side by side, else sums of slices."""

    def form(  # noqa: PLR0913, PLR0917, torch's own signature
        inputs: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        """The mean under every window, with the arguments of torch's own function."""
        kernel = _each(kernel_size, axes)
        slide = (_each(stride or kernel_size, axes), _each(padding, axes), (1,) * axes)
        window = Window.of(kernel, *slide)
        if window.tiles and not ceil_mode and not divisor_override:
            return _tiled_mean(inputs, kernel)
        sums, counts = inputs, []
        overhang = window.overhang(inputs.shape[-axes:]) if ceil_mode else (0,) * axes
        for place, more in enumerate(overhang):
            axis = inputs.dim() - axes + place
            line = Window(*((part[place],) for part in (window.kernel, window.stride, window.padding, window.dilation)))
            size = inputs.shape[axis]
            sums = _line_sums(sums, axis, line, more)
            counts.append(_counts(line, size, sums.shape[axis], padded=count_include_pad))
        divisor = np.asarray(divisor_override or functools.reduce(np.multiply.outer, counts), np.float32)
        return sums / torch.from_numpy(divisor).to(inputs.device)

    return form


def _tiled_mean(inputs: Tensor, kernel: Sequence[int]) -> Tensor:
    axes = len(kernel)
    counts = [size // length for size, length in zip(inputs.shape[-axes:], kernel, strict=True)]
    covered: list[Any] = [slice(count * length) for count, length in zip(counts, kernel, strict=True)]
    cut = inputs[(..., *covered)]
    apart = [size for pair in zip(counts, kernel, strict=True) for size in pair]
    return cut.reshape(*inputs.shape[:-axes], *apart).mean(list(range(1 - 2 * axes, 0, 2)))


def _line_sums(inputs: Tensor, axis: int, line: Window, overhang: int) -> Tensor:
    """The sum under a window along one axis."""
    (pad,), (step,) = line.padding, line.stride
    sides = [0, 0] * (inputs.dim() - 1 - axis) + [pad, pad + overhang]
    padded = functional.pad(inputs, sides) if pad or overhang else inputs
    count = (padded.shape[axis] - line.kernel[0]) // step + 1
    before = (slice(None),) * axis
    taps = [padded[(*before, slice(tap, tap + (count - 1) * step + 1, step))] for tap in range(line.kernel[0])]
    return functools.reduce(torch.add, taps)


def _counts(line: Window, size: int, windows: int, *, padded: bool) -> np.ndarray:
    """The number of places that each window counts: those within the axis and, if `padded`, in its padding."""
    (kernel,), (step,), (pad,) = line.kernel, line.stride, line.padding
    starts = np.arange(windows) * step - pad
    ends = np.minimum(starts + kernel, size + pad)
    return ends - starts if padded else np.minimum(ends, size) - np.maximum(starts, 0)


def _bins(size: int, wanted: int) -> list[tuple[int, int]]:
    """The first place and the end of each cell of an adaptive pool along an axis of `size`."""
    return [(cell * size // wanted, -(-(cell + 1) * size // wanted)) for cell in range(wanted)]


def adaptive_avg_pool(axes: int) -> Callable[..., Tensor]:
    """The mean of each cell, as a product with a constant matrix for each axis; over everything, a plain mean."""

    def form(inputs: Tensor, output_size: Any) -> Tensor:
        """The mean of each cell of an output of this size."""
        wanted = _wanted(inputs, output_size, axes)
        if set(wanted) == {1}:
            return inputs.mean(list(range(-axes, 0)), keepdim=True)
        for axis, cells in enumerate(wanted, inputs.dim() - axes):
            matrix = np.zeros((cells, inputs.shape[axis]), np.float32)
            for cell, (start, end) in enumerate(_bins(inputs.shape[axis], cells)):
                matrix[cell, start:end] = 1 / (end - start)
            inputs = _along(inputs, axis, matrix)
        return inputs

    return form


def adaptive_max_pool(axes: int) -> Callable[..., Tensor]:
    """The largest of each cell; among equal ones, the first gets the gradient."""

    def form(inputs: Tensor, output_size: Any, return_indices: bool = False) -> Tensor:
        """The largest of each cell of an output of this size. Raises UnsupportedOperator for indices."""
        if return_indices:
            raise UnsupportedOperator("adaptive max-pooling that returns indices")
        wanted = _wanted(inputs, output_size, axes)
        bins = [_bins(size, cells) for size, cells in zip(inputs.shape[-axes:], wanted, strict=True)]
        largest = []
        for cell in itertools.product(*bins):
            reach: list[Any] = [slice(*ends) for ends in cell]
            largest.append(inputs[(..., *reach)].flatten(-axes).max(-1).values)
        return torch.stack(largest, -1).reshape(*inputs.shape[:-axes], *wanted)

    return form


def _wanted(inputs: Tensor, output_size: Any, axes: int) -> tuple[int, ...]:
    sizes = output_size if isinstance(output_size, tuple | list) else (output_size,) * axes
    return tuple(have if size is None else size for size, have in zip(sizes, inputs.shape[-axes:], strict=True))


def interpolate(  # noqa: PLR0913, PLR0917, torch's own signature
    inputs: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Each axis by itself: a repetition where nearest places lie evenly, else a product with a constant matrix."""
    if mode not in LINES or antialias:
        how = f"by {mode!r}" + " with antialias" * antialias
        raise UnsupportedOperator(f"interpolation {how}; there are {', '.join(LINES)}")
    axes = inputs.dim() - 2
    factors = scale_factor if isinstance(scale_factor, tuple | list) else [scale_factor] * axes
    for axis, factor in enumerate(factors, 2):
        have = inputs.shape[axis]
        cells = _each(size, axes)[axis - 2] if factor is None else int(have * factor)
        # torch steps by the given factor, if any, even if it does not divide evenly.
        walk = have / cells if factor is None or recompute_scale_factor else 1 / factor
        if mode in {"nearest", "nearest-exact"} and cells % have == 0 and walk == have / cells:
            inputs = inputs.repeat_interleave(cells // have, axis)
        else:
            inputs = _along(inputs, axis, LINES[mode](have, cells, walk, bool(align_corners)))
    return inputs


def _nearest(have: int, cells: int, walk: float, align_corners: bool, centre: float = 0.0) -> np.ndarray:
    places = np.floor((np.arange(cells, dtype=np.float32) + np.float32(centre)) * np.float32(walk)).astype(int)
    matrix = np.zeros((cells, have), np.float32)
    matrix[np.arange(cells), np.minimum(places, have - 1)] = 1
    return matrix


def _linear(have: int, cells: int, walk: float, align_corners: bool) -> np.ndarray:
    if align_corners:
        places = np.arange(cells) * (have - 1) / max(cells - 1, 1)
    else:
        places = np.maximum((np.arange(cells) + 0.5) * walk - 0.5, 0)
    low = np.minimum(places.astype(int), have - 1)
    share = places - low
    matrix = np.zeros((cells, have), np.float32)
    np.add.at(matrix, (np.arange(cells), low), 1 - share)
    np.add.at(matrix, (np.arange(cells), np.minimum(low + 1, have - 1)), share)
    return matrix


LINES: dict[str, Callable[[int, int, float, bool], np.ndarray]] = {
    "nearest": _nearest,
    "nearest-exact": functools.partial(_nearest, centre=0.5),
    "linear": _linear,
    "bilinear": _linear,
    "trilinear": _linear,
}


def _along(inputs: Tensor, axis: int, matrix: np.ndarray) -> Tensor:
    """A product with a matrix (cells, size) along one axis of that size."""
    constant = torch.from_numpy(matrix).to(inputs.device)
    return (inputs.movedim(axis, -1) @ constant.t()).movedim(-1, axis)
