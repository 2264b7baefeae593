"""Rewrites of a recording: accumulation in place, sums of biases, and products by oneDNN.

A local step of descent ends like this, with a gradient g as large as the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch

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
