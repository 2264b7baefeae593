"""Hold-outs: shares of a population's devices and of a collection's examples that hashes keep apart from training.

Spec: docs/spec/rounds.md §6, docs/spec/plan.md §1.1. A hash depends on no task, round or seed, and a smaller share is
always within a larger one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.errors import PlanError
from fedcore.validation import demand

_DEVICE, _EXAMPLE = b"muster.hold-out.device.v1\0", b"muster.hold-out.example.v1\0"
Side = Literal["train", "held-out"]


def is_held_out(population: str, device: str, share: float) -> bool:
    """Whether the device with this id is in the held-out share, from 0 to below 1, of a population."""
    return _is_below(hashlib.sha256(_DEVICE + population.encode() + b"\0" + device.encode()).digest(), share)


class HoldOut(msgspec.Struct, frozen=True):
    """The share of a collection's examples that is held out, and the side of it that a plan runs on."""

    share: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    side: Side = "train"

    @classmethod
    def asked(cls, share: float, *, on_held_out: bool) -> HoldOut | None:
        """The hold-out that export or a simulation was asked for; None for a share of 0.

        Raises PlanError naming the option that is not what it may be.
        """
        demand(PlanError, 0 <= share < 1, "hold_out_examples", "a number, at least 0 and below 1", share)
        wording = "left out without hold_out_examples: no example is held out"
        demand(PlanError, bool(share) or not on_held_out, "on_held_out_examples", wording, on_held_out)
        return cls(share, "held-out" if on_held_out else "train") if share else None

    def kept(self, collection: str, columns: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
        """Which examples (n,) are on this side. columns: the fields in the plan's order and dtypes, (n, …) each."""
        start = hashlib.sha256(_EXAMPLE + collection.encode() + b"\0")
        held_out = np.zeros(len(columns[0]), bool)
        for index, parts in enumerate(zip(*map(_rows, columns), strict=True)):
            digest = start.copy()
            for part in parts:
                digest.update(part)
            held_out[index] = _is_below(digest.digest(), self.share)
        return held_out if self.side == "held-out" else ~held_out


def _is_below(digest: bytes, share: float) -> bool:
    # A power of two scales a float exactly, and Python compares integers and floats exactly.
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _rows(column: NDArray[Any]) -> list[memoryview]:
    """The little-endian bytes of each example of a column (n, …)."""
    flat = np.ascontiguousarray(column, column.dtype.newbyteorder("<")).reshape(-1)
    data, width = flat.view(np.uint8).data, flat.nbytes // max(len(column), 1)
    return [data[place * width : (place + 1) * width] for place in range(len(column))]
