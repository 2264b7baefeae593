"""Accumulation in place: for `x + a · g`, the parts of g are added to a copy of x, and g as a whole is never made.

A local step of descent ends so, where g is a gradient as large as the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from simulator.engines.layout import fills_buffer, row_major
from simulator.engines.recording import Call, Place, Recording

aten = torch.ops.aten
SIGNS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
# Products of matrices, and what adds such a product to what is there.
ADDED = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def accumulate(recording: Recording) -> None:
    """Add products of matrices where they are to be added, if nothing else reads them."""
    for call in [call for call in recording.calls if call.operator in SIGNS and call.made]:
        if makers := _makers(recording, call):
            _replace(recording, call, makers)


def _makers(recording: Recording, call: Call) -> list[Call]:
    """The calls that make g, if `call` alone reads g, and all of it, and some of them are products; else none."""
    start, added = call.args
    (whole,) = (place for place in call.results if place)
    if not isinstance(start, Place) or not isinstance(added, Place) or start.dtype is not whole.dtype:
        return []
    makers = [one for one in recording.calls if added.buffer in one.made or _copies_to(one, added.buffer)]
    if added.buffer in recording.given or not any(maker.operator in ADDED for maker in makers):
        return []
    lies = (whole.dtype, whole.size, row_major(whole.size))
    if any(
        (one.dtype, one.size, one.stride) != lies or not fills_buffer(one, recording.calls, recording)
        for one in (added, whole)
    ):
        return []
    others = [one for one in recording.calls if added.buffer in one.touched and one is not call]
    elsewhere = {place.buffer for place in [start, *recording.outputs.values()]}
    alone = len(others) == len(makers) and added.buffer not in elsewhere and whole.buffer not in recording.written
    return makers if alone else []


def _copies_to(call: Call, buffer: int) -> bool:
    return call.operator is aten.copy_.default and call.args[0].buffer == buffer != call.args[1].buffer


def _replace(recording: Recording, call: Call, makers: list[Call]) -> None:
    """Replace `call`, and the makers of g that need not be called any more, by additions to the whole."""
    (whole,) = (place for place in call.results if place)
    factor, written = SIGNS[call.operator] * call.kwargs.get("alpha", 1), recording.written
    added, replaced = [Call(aten.copy_.default, (whole, call.args[0]), {}, [])], {id(call)}
    for maker in makers:
        for operator, part, terms in _additions(maker, call.args[1].buffer, written):
            added.append(Call(operator, (replace(part, buffer=whole.buffer), *terms), {"alpha": factor}, []))
            if part not in terms:
                replaced.add(id(maker))
    at = next(index for index, one in enumerate(recording.calls) if one is call)
    recording.calls[at:at] = added
    recording.calls = [one for one in recording.calls if id(one) not in replaced]


def _additions(maker: Call, buffer: int, written: set[int]) -> Iterator[tuple[Any, Place, tuple[Place, ...]]]:
    """For each part of g that a call makes: what adds it, where it lies in g, and the terms to add.

    The part itself is the term where what it is made of is written to, and may be something else at the end.
    """
    lasts = not (maker.read - {buffer}) & written
    if maker.operator in ADDED and lasts:
        yield ADDED[maker.operator], next(place for place in maker.results if place), maker.args
    elif maker.operator is aten.copy_.default:
        yield aten.add_.Tensor, maker.args[0], maker.args[1:2] if lasts else maker.args[:1]
    else:
        for place in maker.results:
            if place and place.buffer == buffer:
                yield aten.add_.Tensor, place, (place,)
