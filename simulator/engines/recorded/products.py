"""Products of matrices by oneDNN, where it is faster than torch's default library.

Both compute `x Wᵀ` and `x W` on a CPU. From LARGE multiplications on, oneDNN needs 0.7 to 1 of the time of MKL; below,
its calls cost more. Products that are transposed on the left, as in the gradients of weights, are unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from simulator.engines.recorded.layout import fills_buffer, row_major
from simulator.engines.recorded.recording import Call, Place, Recording

aten = torch.ops.aten
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
