"""Gradients of the biases of convolutions: sums over all pixels, for which torch is faster than oneDNN.

Pooling by maximum passes every gradient on to one pixel, so the sum is the same before that, over fewer values.
"""

from __future__ import annotations

import torch

from simulator.engines.recorded.recording import POOLED_BACKWARD, Call, Place, Recording

aten = torch.ops.aten


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
