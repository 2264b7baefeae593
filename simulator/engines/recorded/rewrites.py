"""Rewrites of a recording: accumulation in place, order, sums of biases, pooling, and products by oneDNN.

A local step of descent ends like this, with a gradient g as large as the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from simulator.engines.recorded.layout import Users, fills_buffer, row_major
from simulator.engines.recorded.recording import POOLED_BACKWARD, Call, Place, Recording, places

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


ADDING = {torch.ops.aten.addmm_.default, torch.ops.aten.baddbmm_.default}


def add_early(recording: Recording, storages: Mapping[int, torch.UntypedStorage]) -> None:
    """Move every addition of a product to memory that is already there to right after the last call that it depends on.

    storages: the memory of buffers that is already there; results made in an argument's place have its memory.
    """
    uses: dict[int, _Use] = {}

    def use(call: Call) -> _Use:
        if id(call) not in uses:
            uses[id(call)] = _Use.of(call, storages)
        return uses[id(call)]

    for index, call in enumerate(recording.calls):
        if call.operator in ADDING and call.args[0].buffer in storages:
            to = index
            while to and not use(call).depends_on(use(recording.calls[to - 1])):
                to -= 1
            recording.calls.insert(to, recording.calls.pop(index))


_Span = tuple[int, int, int]
"""Memory, and the first byte and the one after the last there."""


@dataclass(frozen=True, slots=True)
class _Use:
    """The memory that a call reads, and that it writes."""

    read: list[_Span]
    written: list[_Span]

    @classmethod
    def of(cls, call: Call, storages: Mapping[int, torch.UntypedStorage]) -> _Use:
        def spans(tree: Any, buffers: set[int]) -> list[_Span]:
            return [_span(place, storages) for place in places(tree) if place.buffer in buffers]

        arguments = (call.args, call.kwargs)
        return cls(spans(arguments, call.read), spans(arguments, call.written) + spans(call.results, call.made))

    def depends_on(self, other: _Use) -> bool:
        """Whether its result depends on running before or after the other."""
        return _meet(self.read, other.written) or _meet(self.written, other.read + other.written)


def _span(place: Place, storages: Mapping[int, torch.UntypedStorage]) -> _Span:
    memory = storages[place.buffer]._cdata if place.buffer in storages else -place.buffer
    last = sum((count - 1) * step for count, step in zip(place.size, place.stride, strict=True))
    return memory, place.offset * place.dtype.itemsize, (place.offset + last + 1) * place.dtype.itemsize


def _meet(some: list[_Span], others: list[_Span]) -> bool:
    return any(
        memory == other and start < stop_there and start_there < stop
        for memory, start, stop in some
        for other, start_there, stop_there in others
    )


def sum_for_biases(recording: Recording) -> None:
    """Compute the gradients of biases of convolutions separately."""
    written = recording.written
    lasting = [call for call in recording.calls if not call.touched & written]
    makers = {place.buffer: call for call in lasting for place in call.results if place}
    calls = []
    for call in recording.calls:
        bias = call.results[2] if call.operator is aten.convolution_backward.default else None
        if bias is not None:
            *others, wanted = call.args
            call.args, call.results = (*others, [*wanted[:2], False]), [*call.results[:2], None]
            pixels = _least(call.args[0], makers)
            axes = [axis for axis in range(len(pixels.size)) if axis != 1]
            calls.append(Call(aten.sum.dim_IntList, (pixels, axes), {}, [bias]))
        calls.append(call)
    recording.calls = calls


def _least(gradient: Place, makers: dict[int, Call]) -> Place:
    """The gradient, or a smaller one with the same sums in each channel."""
    maker = makers.get(gradient.buffer)
    if maker is None or maker.operator is not POOLED_BACKWARD or maker.results != [gradient]:
        return gradient
    pooled: Place = maker.args[0]
    return pooled


POOLED = aten.max_pool2d_with_indices.default
CHAIN = [aten.clamp_min.default, POOLED, POOLED_BACKWARD, aten.threshold_backward.default]


def pool_first(recording: Recording) -> None:
    """Move pooling by maximum before a ReLU that nothing else reads."""
    for pool in [call for call in recording.calls if call.operator is POOLED]:
        chain = [call for call in recording.calls if pool.args[0].buffer in call.touched]
        if [call.operator for call in chain] == CHAIN and _may_turn(recording, *chain):
            _turn(recording, *chain)


def _may_turn(recording: Recording, relu: Call, pool: Call, pool_backward: Call, relu_backward: Call) -> bool:
    """Whether ReLU and pooling, and their gradients, may be swapped."""
    rectified, passed = pool.args[0], relu_backward.args[0]
    chained = (
        relu.results == [rectified]
        and pool_backward.results == [passed]
        and rectified == pool_backward.args[1] == relu_backward.args[1]
        and pool.results[1] == pool_backward.args[-1]
        and not relu.args[1]
        and not relu_backward.args[2]
    )
    readers = [call for call in recording.calls if passed.buffer in call.read]
    gone = {rectified.buffer, passed.buffer} & {place.buffer for place in recording.outputs.values()}
    written = (relu.touched | pool.touched | pool_backward.touched) & recording.written
    return chained and readers == [relu_backward] and not gone and not written


def _turn(recording: Recording, relu: Call, pool: Call, pool_backward: Call, relu_backward: Call) -> None:
    pooled, indices = (place for place in pool.results if place)
    maxima, passed, gradient = recording.like(pooled), recording.like(pooled), pool_backward.args[0]
    inner = Call(pool.operator, (relu.args[0], *pool.args[1:]), pool.kwargs, [maxima, indices], one_result=False)
    outer = Call(relu.operator, (maxima, 0), {}, [pooled])
    outer_backward = Call(relu_backward.operator, (gradient, pooled, 0), {}, [passed])
    inner_backward = Call(
        pool_backward.operator,
        (passed, relu.args[0], *pool_backward.args[2:]),
        pool_backward.kwargs,
        relu_backward.results,
    )
    turned = {
        id(relu): [],
        id(pool): [inner, outer],
        id(pool_backward): [outer_backward, inner_backward],
        id(relu_backward): [],
    }
    recording.calls = [replacement for call in recording.calls for replacement in turned.get(id(call), [call])]


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
