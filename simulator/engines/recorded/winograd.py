"""Winograd's algorithm for the gradients of convolutions with 3×3 kernels that move by one pixel.

A tile of 4×4 results depends on a patch of 6×6 pixels. Transformed, a patch, a kernel and the gradient of a tile have
36 numbers each, which are multiplied elementwise: a quarter of the multiplications, as 36 products of small matrices.
Torch still computes the results of layers, because their rounding decides on which side of a kink a value falls, and so
the gradients. Source: A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016, with other
points for smaller rounding errors.

Shapes: B images, I channels in, O channels out, T tiles; 36 = 6×6 numbers of a transformed patch, kernel or gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simulator.engines.recorded.layout import row_major
from simulator.engines.recorded.recording import Call, Place, Recording

aten = torch.ops.aten
# A tile of TILE² results needs PATCH² pixels.
TILE, PATCH = 4, 6
# Where polynomials are evaluated, beside infinity. With 0, ±1 and ±2 the gradients have twice the round-off.
POINTS = (0, 5 / 8, -5 / 8, 3 / 2, -3 / 2)
# Layers gain that have so many channels on either side, and so many pairs of them, and fill this part of their tiles.
CHANNELS, PAIRS, FILLED = 32, 1536, 0.9
# So many tiles, or those of one image, are computed at a time, so that what is made of them stays in cache.
TOGETHER = 128


def differentiate_by_winograd(recording: Recording) -> None:
    """Compute the gradients of convolutions by Winograd's algorithm where it is faster."""
    calls = []
    for call in recording.calls:
        gains = call.operator is aten.convolution_backward.default and _gains(*call.args[:3], *call.args[4:])
        calls += _Layer(recording, call).calls() if gains else [call]
    recording.calls = calls


def _gains(gradient: Place, image: Place, kernel: Place, stride: list[int], padding: list[int], *rest: Any) -> bool:
    """Whether this algorithm can compute the gradients of a convolution, and is faster."""
    *others, wanted = rest
    if (kernel.size[2:], stride, *others) != ((3, 3), [1, 1], [1, 1], False, [0, 0], 1) or not all(wanted[:2]):
        return False
    inward, outward = image.size[1], kernel.size[0]
    sides = gradient.size[2:]
    covered = math.prod(TILE * _tiles_along(side) for side in sides)
    return (
        image.dtype is torch.float32
        and kernel.stride == row_major(kernel.size)
        and image.size[0] > 0
        and min(inward, outward) >= CHANNELS
        and inward * outward >= PAIRS
        and math.prod(sides) >= FILLED * covered
    )


def _tiles_along(side: int) -> int:
    return -(-side // TILE)


class _Layer:
    """The calls that compute the gradients of a layer."""

    def __init__(self, recording: Recording, backward: Call) -> None:
        self._recording, self._backward = recording, backward
        self._gradient, self._image, kernel, _, _, self._padding, *_ = backward.args
        self._rows, self._columns = map(_tiles_along, self._gradient.size[2:])
        self._of_patch, self._of_kernel, self._of_tile = map(recording.constant, _transforms())
        self._calls: list[Call] = []
        outward, inward = kernel.size[:2]
        each = replace(kernel, size=(9, outward, inward), stride=(1, 9 * inward, 9))
        self._kernels = self._transform(self._of_kernel, each)

    def calls(self) -> list[Call]:
        """The calls that make the gradients of image and kernel."""
        image, kernel = (place for place in self._backward.results if place)
        outward, inward, *_ = kernel.size
        products = self._recording.new((PATCH**2, inward, outward))
        self._call(aten.zero_.default, products)
        for start, stop in self._parts():
            gradients = self._squares(self._padded(_some(self._gradient, start, stop), 0, [0, 0]), TILE)
            gradients = self._transform(_turned(self._of_tile), gradients)
            patches = self._transform(_turned(self._of_patch), self._product(gradients, self._kernels))
            self._overlap(patches, _some(image, start, stop))
            whole = self._padded(_some(self._image, start, stop), PATCH - TILE, self._padding)
            patches = self._transform(self._of_patch, self._squares(whole, PATCH))
            self._call(aten.baddbmm_.default, products, _turned(patches), gradients)
        gradient = self._transform(_turned(self._of_kernel), products)  # (9, I, O)
        gradient = replace(gradient, size=kernel.size, stride=(1, outward, 3 * inward * outward, inward * outward))
        self._call(aten.clone.default, gradient, result=kernel)
        return self._calls

    def _parts(self) -> Iterator[tuple[int, int]]:
        """The first image of each part of the batch, and the one after its last."""
        count, *_ = self._image.size
        step = max(1, TOGETHER // (self._rows * self._columns))
        for start in range(0, count, step):
            yield start, min(start + step, count)

    def _transform(self, matrix: Place, numbers: Place) -> Place:
        """Numbers (N, rows, channels) transformed by a matrix (M, N), as (M, rows, channels)."""
        result = self._recording.new((matrix.size[0], *numbers.size[1:]))
        self._call(aten.mm.default, matrix, _joined(numbers), result=_joined(result))
        return result

    def _product(self, left: Place, right: Place) -> Place:
        """36 products of matrices."""
        result = self._recording.new((*left.size[:2], right.size[2]))
        self._call(aten.bmm.default, left, right, result=result)
        return result

    def _squares(self, images: Place, side: int) -> Place:
        """The squares of pixels in images, one for each tile, as (side², T, channels)."""
        cut = self._cut(images, side)
        result = self._recording.new((side**2, math.prod(cut.size[2:5]), cut.size[5]))
        self._call(aten.clone.default, cut, result=_shaped(result, *cut.size))
        return result

    def _cut(self, images: Place, side: int) -> Place:
        """The places of squares in images: (side, side, images, rows, columns, channels). Patches overlap."""
        count, channels, *_ = images.size
        image, channel, down, across = images.stride
        size = (side, side, count, self._rows, self._columns, channels)
        return replace(images, size=size, stride=(down, across, image, TILE * down, TILE * across, channel))

    def _padded(self, images: Place, beyond: int, padding: list[int]) -> Place:
        """Images as large as all tiles and `beyond` pixels, with zeros around."""
        whole = self._whole(images, beyond)
        if whole is not images:
            self._call(aten.zero_.default, whole)
            self._call(aten.copy_.default, _window(whole, padding, images), images)
        return whole

    def _whole(self, images: Place, beyond: int) -> Place:
        """A place for images as large as all tiles and `beyond` pixels: their own, if they are that large."""
        count, channels, *sides = images.size
        height, width = TILE * self._rows + beyond, TILE * self._columns + beyond
        if sides == [height, width]:
            return images
        return _ordered(self._recording.new((count, height, width, channels)), (0, 3, 1, 2))

    def _overlap(self, patches: Place, images: Place) -> None:
        """Write the images that patches (36, T, I) add up to, where they overlap."""
        whole = self._whole(images, PATCH - TILE)
        to = self._cut(whole, PATCH)
        patches = _shaped(patches, *to.size)
        self._call(aten.zero_.default, whole)
        self._call(aten.copy_.default, _piece(to, False, False), _piece(patches, False, False))
        for below, beside in ((False, True), (True, False), (True, True)):
            self._call(aten.add_.Tensor, _piece(to, below, beside), _piece(patches, below, beside))
        if whole is not images:
            self._call(aten.clone.default, _window(whole, self._padding, images), result=images)

    def _call(self, operator: Any, *args: Any, result: Place | None = None) -> None:
        self._calls.append(Call(operator, args, {}, [result] if result else []))


def _shaped(place: Place, *size: int) -> Place:
    """A row-major place in another shape."""
    return replace(place, size=size, stride=row_major(size))


def _joined(place: Place) -> Place:
    """(N, rows, channels) as (N, rows · channels)."""
    count, rows, channels = place.size
    return replace(place, size=(count, rows * channels), stride=(place.stride[0], place.stride[2]))


def _ordered(place: Place, axes: tuple[int, ...]) -> Place:
    """The axes of a place in another order."""
    size, stride = (tuple(along[axis] for axis in axes) for along in (place.size, place.stride))
    return replace(place, size=size, stride=stride)


def _turned(place: Place) -> Place:
    """A place with its last two axes exchanged."""
    *before, row, column = range(len(place.size))
    return _ordered(place, (*before, column, row))


def _some(images: Place, start: int, stop: int) -> Place:
    return replace(images, size=(stop - start, *images.size[1:]), offset=images.offset + start * images.stride[0])


def _window(whole: Place, padding: list[int], images: Place) -> Place:
    """The place of images in larger ones."""
    offset = sum(added * step for added, step in zip(padding, whole.stride[2:], strict=True))
    return replace(whole, size=images.size, offset=whole.offset + offset)


def _piece(patches: Place, below: bool, beside: bool) -> Place:
    """The pixels of patches (6, 6, …) that are the tile's own, or lie below or beside it, in the next patches too."""
    starts = [TILE * below, TILE * beside]
    size = [PATCH - TILE if start else TILE for start in starts]
    offset = sum(start * step for start, step in zip(starts, patches.stride, strict=False))
    return replace(patches, size=(*size, *patches.size[2:]), offset=patches.offset + offset)


@functools.cache
def _transforms() -> tuple[Tensor, Tensor, Tensor]:
    """The transforms of patches (36, 36), of kernels (36, 9), and from products to tiles (16, 36)."""
    points, infinity = np.array(POINTS), np.eye(1, PATCH, PATCH - 1)
    others = [np.delete(points, index) for index in range(len(points))]
    scale = [np.prod(point - other) for point, other in zip(points, others, strict=True)]
    patch = np.vstack([*(np.append(np.poly(other)[::-1], 0) for other in others), np.poly(points)[::-1]])
    kernel = np.vstack([np.vander(points, 3, increasing=True) / np.array(scale)[:, None], infinity[:, -3:]])
    tile = np.vstack([np.vander(points, TILE, increasing=True), infinity[:, -TILE:]]).T
    of_patch, of_kernel, of_tile = (
        torch.from_numpy(np.kron(matrix, matrix)).float() for matrix in (patch, kernel, tile)
    )
    return of_patch, of_kernel, of_tile
