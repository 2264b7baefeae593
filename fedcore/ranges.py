"""Ranges: the bounds and the precision of a segment's values, where these are known beforehand. It needs no NumPy.

Spec: docs/spec/plan.md §5.3.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec.structs import force_setattr

from fedcore.errors import ReportError

MOST_BITS = 20
LEAST_WIDTH, MOST_WIDTH = 1e-30, 1e30
"""Of a range: its steps, too, are then normal numbers in float32."""


class Range(msgspec.Struct, frozen=True):
    """The numbers from `low` to `high`, 0 among them, in 2^bits − 1 equal steps.

    Whole numbers are exact where high − low is 2^bits − 1 and low is whole: Range(0, 2**20 - 1, 20) counts. Raises
    ReportError for a range without 0, one that is empty or wider than 10^30, and more than 20 bits.
    """

    low: float
    high: float
    bits: Annotated[int, msgspec.Meta(ge=1, le=MOST_BITS)]

    def __post_init__(self) -> None:
        for name in ("low", "high"):  # a plan has one spelling of a number
            force_setattr(self, name, float(getattr(self, name)))
        if not (self.low <= 0 <= self.high and LEAST_WIDTH <= self.high - self.low <= MOST_WIDTH):
            raise ReportError(
                f"a range must hold 0 and be from {LEAST_WIDTH:g} to {MOST_WIDTH:g} wide, not from {self.low:g} to "
                f"{self.high:g}"
            )
        if not 1 <= self.bits <= MOST_BITS:
            raise ReportError(f"a range has from 1 to {MOST_BITS} bits, not {self.bits}")
