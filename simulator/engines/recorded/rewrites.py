"""Rewrites of a recording: accumulation in place, sums of biases, products by oneDNN, Winograd's algorithm.

A local step of descent ends like this, with a gradient g as large as the model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simulator.engines.recorded.layout import Users, fills_buffer, row_major
from simulator.engines.recorded.recording import Call, Place, Recording

aten = torch.ops.aten
SIGNS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
# Products of matrices, and the operators that add such a product to an existing tensor.
ADDED = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def accumulate(recording: Recording) -> None:
    """Add products of matrices directly to their target, if nothing else reads them."""
    users = Users(recording)
    for call in [call for call in recording.calls if call.operator in SIGNS and call.made]:
        if makers := _makers(users, call):
            _replace(users, call, makers)


def _makers(users: Users, call: Call) -> list[Call]:
    """The calls that make g, if only `call` reads g, and all of it, and some of them are products; else none."""
    start, added = call.args
    (whole,) = (place for place in call.results if place)
    if not isinstance(start, Place) or not isinstance(added, Place) or start.dtype is not whole.dtype:
        return []
    recording, readers = users.recording, users.of(added.buffer)
    makers = [reader for reader in readers if added.buffer in reader.made or _copies_to(reader, added.buffer)]
    if added.buffer in recording.external or not any(maker.operator in ADDED for maker in makers):
        return []
    elsewhere = {place.buffer for place in [start, *recording.outputs.values()]}
    if len(readers) > len(makers) + 1 or added.buffer in elsewhere or users.write(whole.buffer):
        return []
    lies = (whole.dtype, whole.size, row_major(whole.size))
    alike = all((place.dtype, place.size, place.stride) == lies for place in (added, whole))
    fill = alike and all(fills_buffer(place, users.of(place.buffer), recording) for place in (added, whole))
    return makers if fill else []


def _copies_to(call: Call, buffer: int) -> bool:
    return call.operator is aten.copy_.default and call.args[0].buffer == buffer != call.args[1].buffer


def _replace(users: Users, call: Call, makers: list[Call]) -> None:
    """Replace `call`, and the makers of g that are no longer needed, by additions to the whole."""
    (whole,) = (place for place in call.results if place)
    factor = SIGNS[call.operator] * call.kwargs.get("alpha", 1)
    added, replaced = [Call(aten.copy_.default, (whole, call.args[0]), {}, [])], []
    for maker in makers:
        unread = False
        for operator, part, terms in _additions(maker, call.args[1].buffer, users):
            added.append(Call(operator, (replace(part, buffer=whole.buffer), *terms), {"alpha": factor}, []))
            unread |= part not in terms
        if unread:
            replaced.append(maker)
    users.replace(call, added)
    for maker in replaced:
        users.replace(maker, [])


def _additions(maker: Call, buffer: int, users: Users) -> Iterator[tuple[Any, Place, tuple[Place, ...]]]:
    """For each part of g that a call makes: the adding operator, the place in g, and the terms to add.

    The part itself is the term if one of its operands is overwritten, and may have changed at the end.
    """
    lasts = not any(users.write(other) for other in maker.read - {buffer})
    if maker.operator in ADDED and lasts:
        yield ADDED[maker.operator], next(place for place in maker.results if place), maker.args
    elif maker.operator is aten.copy_.default:
        yield aten.add_.Tensor, maker.args[0], maker.args[1:2] if lasts else maker.args[:1]
    else:
        for place in maker.results:
            if place and place.buffer == buffer:
                yield aten.add_.Tensor, place, (place,)


def sum_for_biases(recording: Recording) -> None:
    """Sum the gradients of biases of convolutions by torch, faster than oneDNN; Winograd's algorithm makes none."""
    calls = []
    for call in recording.calls:
        bias = call.results[2] if call.operator is aten.convolution_backward.default else None
        if bias is not None:
            pixels, *others, wanted = call.args
            call.args, call.results = (pixels, *others, [*wanted[:2], False]), [*call.results[:2], None]
            axes = [axis for axis in range(len(pixels.size)) if axis != 1]
            calls.append(Call(aten.sum.dim_IntList, (pixels, axes), {}, [bias]))
        calls.append(call)
    recording.calls = calls


# Products of matrices by oneDNN, where it is faster than torch's default library.
#
# Both compute `x Wᵀ` and `x W` on a CPU. From LARGE multiplications on, oneDNN needs 0.7 to 1 of the time of MKL;
# below, its calls cost more. Products that are transposed on the left, as in the gradients of weights, are unchanged.

LARGE = 2**23


def multiply_by_onednn(recording: Recording) -> None:
    """Let large products of matrices be computed by oneDNN, if torch has it."""
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        for call in recording.calls:
            if call.operator in {aten.mm.default, aten.addmm.default} and _gains(recording, call):
                *added, left, right = call.args
                turned = replace(right, size=right.size[::-1], stride=right.stride[::-1])
                call.operator = torch.ops.mkldnn._linear_pointwise.default
                call.args, call.kwargs = (left, turned, added[0] if added else None, "none", [], ""), {}


def _gains(recording: Recording, call: Call) -> bool:
    """Whether a call is a large product in float32 that makes all of its result."""
    (whole,) = (place for place in call.results if place)
    *added, left, right = call.args
    large = prod(left.size) * right.size[1] >= LARGE
    vectors = all(
        isinstance(argument, Place) and (argument.size, argument.stride) == (right.size[1:], (1,)) for argument in added
    )
    return (
        large
        and vectors
        and not call.kwargs
        and left.dtype is whole.dtype is torch.float32
        and left.stride == row_major(left.size)
        and whole.stride == row_major(whole.size)
        and fills_buffer(whole, recording.calls, recording)
    )


# Winograd's algorithm for the gradients of convolutions with 3×3 kernels that move by one pixel.
#
# A tile of 4×4 results depends on a patch of 6×6 pixels. Transformed, a patch, a kernel and the gradient of a tile have
# 36 numbers each, which are multiplied elementwise: a quarter of the multiplications, as 36 products of small matrices.
# Torch still computes the results of layers, because their rounding decides on which side of a kink a value falls, and
# so the gradients. Source: A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016, with
# other points for smaller rounding errors.
#
# Shapes: B images, I channels in, O channels out, T tiles; 36 = 6×6 numbers of a transformed patch, kernel or gradient.


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
        gains = call.operator is aten.convolution_backward.default and _is_faster(*call.args[:3], *call.args[4:])
        calls += _Layer(recording, call).calls() if gains else [call]
    recording.calls = calls


def _is_faster(gradient: Place, image: Place, kernel: Place, stride: list[int], padding: list[int], *rest: Any) -> bool:
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
