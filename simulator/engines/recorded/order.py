"""The order of calls: a product that is added in place is added as soon as that is safe.

Its target, such as the parameters of a dense layer, was read shortly before, and is then still in cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from simulator.engines.recorded.recording import Call, Place, Recording, places

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
