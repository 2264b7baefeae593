"""Pools, interpolation and similar in operators that every runtime has: sums of slices, and constant matrices.

Each of them works on one axis after the other. The constants are made with NumPy, so that a trace sees constants.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from export.convolution import Window
from export.errors import UnsupportedOperator


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
