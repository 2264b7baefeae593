"""The layout of results: operators write them into existing memory where they are needed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from simulator.engines.recorded.recording import Call, Place, Recording, places

aten = torch.ops.aten
COPIES = {aten.clone.default, aten._to_copy.default}

Writer = Callable[[tuple[Any, ...], dict[str, Any], list[Tensor]], Callable[[], Any]]
"""Binds arguments and results to a function that computes the results from the arguments."""


def writer_of(call: Call) -> Writer | None:
    """A writer that makes a call write its results into existing memory; None if torch has no such form."""
    if call.operator in COPIES:
        return _copying
    if not call.made:
        return lambda args, kwargs, results: functools.partial(call.operator, *args, **kwargs)
    return _writing(call.operator)


def _copying(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> Callable[[], Any]:
    return functools.partial(results[0].copy_, args[0])


@functools.cache
def _writing(operator: torch._ops.OpOverload) -> Writer | None:
    wanted = [(item.name, str(item.type)) for item in operator._schema.arguments]
    for name in operator.overloadpacket.overloads():
        other = getattr(operator.overloadpacket, name)
        outs = [item.name for item in other._schema.arguments if item.is_out]
        parameters = [(item.name, str(item.type)) for item in other._schema.arguments if not item.is_out]
        # What is generated calls the other form, and copies.
        if outs and parameters == wanted and torch.Tag.generated not in other.tags:
            return lambda args, kwargs, results: functools.partial(
                other, *args, **kwargs, **dict(zip(outs, results, strict=True))
            )
    return None


def lay_out_parts(recording: Recording) -> None:
    """Let the parts of every concatenation be written directly into the whole, or copied there if it cannot be."""
    written = {buffer for call in recording.calls for buffer in call.written}
    users = Users(recording)
    for call in [call for call in recording.calls if call.operator is aten.cat.default]:
        (whole,) = (place for place in call.results if place is not None)
        if whole.stride != row_major(whole.size):  # images with their channels last
            continue
        parts = _parts(call, whole)
        copied = [
            index for index, rows in parts.items() if not _moved(users, call.args[0][index], rows, whole, written)
        ]
        # A part may lie in what another part lay in, and has moved with it. So the places are read again.
        copies = [_copy(call.args[0][index], parts[index], whole) for index in copied]
        if copies:
            written.add(whole.buffer)
        users.replace(call, copies)


class Users:
    """The calls of a recording by the buffers that they touch, as searching all calls each time would take minutes."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._calls: dict[int, dict[int, Call]] = {}
        for call in recording.calls:
            self._note(call)

    def of(self, buffer: int) -> list[Call]:
        """The calls that touch a buffer."""
        return list(self._calls.get(buffer, {}).values())

    def write(self, buffer: int) -> bool:
        """Whether one of the calls writes to a buffer that another call made, or that is external."""
        return any(buffer in call.written for call in self.of(buffer))

    def move(self, buffer: int, rows: _Rows) -> None:
        """Move everything in a buffer into rows of another."""
        moved = self._calls.pop(buffer)
        self.recording.move(buffer, rows.place, moved.values())
        self._calls.setdefault(rows.buffer, {}).update(moved)

    def replace(self, call: Call, by: list[Call]) -> None:
        """Replace a call by others."""
        at = next(index for index, existing in enumerate(self.recording.calls) if existing is call)
        self.recording.calls[at : at + 1] = by
        for buffer in call.touched:
            del self._calls[buffer][id(call)]
        for replacement in by:
            self._note(replacement)

    def _note(self, call: Call) -> None:
        for buffer in call.touched:
            self._calls.setdefault(buffer, {})[id(call)] = call


def _parts(call: Call, whole: Place) -> dict[int, _Rows]:
    """The places of a concatenation's parts in the whole, by index."""
    dim: int = (call.args[1] if len(call.args) > 1 else 0) % len(whole.size)
    start, parts = 0, dict[int, _Rows]()
    for index, part in enumerate(call.args[0]):
        if len(part.size) == len(whole.size):  # torch also takes empty vectors, whatever the whole
            parts[index] = _Rows(math.prod(part.size[dim:]), math.prod(whole.size[dim:]), start, whole.buffer)
            start += parts[index].length
    return parts


def _moved(users: Users, part: Place, rows: _Rows, whole: Place, written: set[int]) -> bool:
    """Move a part to its rows of the whole, if possible.

    It is impossible if one of them is written in place, or the part has been moved already.
    """
    if part.buffer == whole.buffer or {part.buffer, whole.buffer} & written or part.dtype != whole.dtype:
        return False
    can_move = _can_move(users, part, rows)
    if can_move:
        users.move(part.buffer, rows)
    return can_move


def _copy(part: Place, rows: _Rows, whole: Place) -> Call:
    to = replace(whole, size=part.size, offset=whole.offset + rows.start)
    return Call(aten.copy_.default, (to, part), {}, [])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of some `length` that become a part of longer ones, from column `start` on, in another buffer."""

    length: int
    longer: int
    start: int
    buffer: int

    def place(self, place: Place) -> Place:
        """The place in the longer rows for a place in these."""
        row, column = divmod(place.offset, self.length)
        stride = tuple(step // self.length * self.longer if step % self.length == 0 else step for step in place.stride)
        return replace(place, buffer=self.buffer, stride=stride, offset=row * self.longer + column + self.start)

    def can_place(self, place: Place) -> bool:
        """Whether no axis of it runs across the end of a row."""
        along = [(count - 1) * step for count, step in zip(place.size, place.stride, strict=True) if step % self.length]
        return sum(along) + place.offset % self.length < self.length


def _can_move(users: Users, part: Place, rows: _Rows) -> bool:
    """Whether a part fills its buffer row by row, and its maker can write it into longer rows."""
    calls = users.of(part.buffer)
    makers = [call for call in calls if part.buffer in call.made]
    if not makers or any(writer_of(maker) is None for maker in makers) or not rows.length:
        return False
    there = _places_in(part.buffer, calls, users.recording)
    in_order = part.stride == row_major(part.size)
    return fills_buffer(part, calls, users.recording) and in_order and all(rows.can_place(source) for source in there)


def fills_buffer(place: Place, calls: list[Call], recording: Recording) -> bool:
    """Whether a place fills its buffer, and all places there have its dtype.

    calls: at least those that touch the buffer.
    """
    whole = place.offset == 0 and recording.nbytes[place.buffer] == math.prod(place.size) * place.dtype.itemsize
    return whole and all(other.dtype == place.dtype for other in _places_in(place.buffer, calls, recording))


def row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major tensor."""
    return torch.empty(size, device="meta").stride()


def may_lie_in(recording: Recording, place: Place, target: Tensor) -> bool:
    """Whether a result may be written into the memory of arguments: no later call may read those."""
    first = next((index for index, call in enumerate(recording.calls) if place.buffer in call.touched), None)
    if first is None or place.buffer in recording.external or writer_of(recording.calls[first]) is None:
        return False
    shape = (target.dtype, tuple(target.shape), target.stride())
    fills = fills_buffer(place, recording.calls, recording)
    if (place.dtype, place.size, place.stride) != shape or not fills:
        return False
    storage = target.untyped_storage()
    buffers = {buffer for buffer, memory in recording.external.items() if memory._cdata == storage._cdata}
    if buffers & {output.buffer for output in recording.outputs.values()}:
        return False
    if any(call.touched & buffers for call in recording.calls[first + 1 :]):
        return False
    maker = recording.calls[first]
    read = [source for source in places((maker.args, maker.kwargs)) if source.buffer in buffers]
    # An operator of single values reads each before it writes there.
    lies = (place.size, place.stride, target.storage_offset())
    alike = all((source.size, source.stride, source.offset) == lies for source in read)
    single = torch.Tag.pointwise in maker.operator.tags or maker.operator is aten.copy_.default
    return not read or (single and alike)


def _places_in(buffer: int, calls: list[Call], recording: Recording) -> list[Place]:
    """The places in a buffer that calls and outputs have."""
    inside = places([(call.args, call.kwargs, call.results) for call in calls])
    return [place for place in (*inside, *recording.outputs.values()) if place.buffer == buffer]
