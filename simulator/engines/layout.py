"""The layout of results: made where they are needed, instead of copied there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from simulator.engines.recording import Call, Place, Recording, places
from simulator.engines.writers import writer_of

aten = torch.ops.aten


def lay_out_parts(recording: Recording) -> None:
    """Let the parts of every concatenation be made in the whole, or copied there where that cannot be."""
    for call in [call for call in recording.calls if call.operator is aten.cat.default]:
        start, copies = 0, list[Call]()
        (whole,) = (place for place in call.results if place is not None)
        dim: int = (call.args[1] if len(call.args) > 1 else 0) % len(whole.size)
        for part in call.args[0]:
            rows = _Rows(math.prod(part.size[dim:]), math.prod(whole.size[dim:]), start, whole.buffer)
            if part.dtype == whole.dtype and _can_move(recording, part, rows):
                recording.move(part.buffer, rows.place)
            else:
                to = replace(whole, size=part.size, offset=whole.offset + start)
                copies.append(Call(aten.copy_.default, (to, part), {}, []))
            start += rows.length
        at = next(index for index, one in enumerate(recording.calls) if one is call)
        recording.calls[at : at + 1] = copies


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of some `length` that become a part of longer ones, from column `start` on, in another buffer."""

    length: int
    longer: int
    start: int
    buffer: int

    def place(self, place: Place) -> Place:
        """What was somewhere in the rows, in the longer ones."""
        row, column = divmod(place.offset, self.length)
        stride = tuple(step // self.length * self.longer if step % self.length == 0 else step for step in place.stride)
        return replace(place, buffer=self.buffer, stride=stride, offset=row * self.longer + column + self.start)

    def can_place(self, place: Place) -> bool:
        """Whether no axis of it runs across the end of a row."""
        along = [(count - 1) * step for count, step in zip(place.size, place.stride, strict=True) if step % self.length]
        return sum(along) + place.offset % self.length < self.length


def _can_move(recording: Recording, part: Place, rows: _Rows) -> bool:
    """Whether a part is all of its buffer, row after row, and its maker can write it in longer rows."""
    makers = [call for call in recording.calls if part.buffer in call.made]
    size = math.prod(part.size)
    if not makers or writer_of(makers[0]) is None or not rows.length:
        return False
    whole = part.offset == 0 and recording.nbytes[part.buffer] == size * part.dtype.itemsize
    in_order = part.stride == torch.empty(part.size, device="meta").stride()
    return (
        whole and in_order and all(rows.can_place(one) for one in _all_places(recording) if one.buffer == part.buffer)
    )


def may_lie_in(recording: Recording, place: Place, storage: torch.UntypedStorage) -> bool:
    """Whether a result may be made in memory that arguments lie in: nobody reads those once it is written to."""
    first = next((index for index, call in enumerate(recording.calls) if place.buffer in call.touched), None)
    if first is None or place.buffer in recording.given or place.offset or writer_of(recording.calls[first]) is None:
        return False
    there = {buffer for buffer, one in recording.given.items() if one._cdata == storage._cdata}
    if there & {one.buffer for one in recording.outputs.values()}:
        return False
    if any(call.touched & there for call in recording.calls[first + 1 :]):
        return False
    maker = recording.calls[first]
    read = [one for one in places((maker.args, maker.kwargs)) if one.buffer in there]
    # An operator of single values reads each before it writes there.
    alike = all((one.size, one.stride) == (place.size, place.stride) for one in read)
    return not read or (torch.Tag.pointwise in maker.operator.tags and alike)


def _all_places(recording: Recording) -> list[Place]:
    inside = places([(call.args, call.kwargs, call.results) for call in recording.calls])
    return [*inside, *recording.outputs.values()]
