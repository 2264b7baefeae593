"""Rotation by a randomised Hadamard transform: it spreads every value over many, so that each needs few bits.

Ailon & Chazelle 2009; Suresh, Yu, Kumar, McMahan 2017, §4. Block by block, x ← H s∘x / √B, with random signs s.
"""

from __future__ import annotations

import numpy as np

from fedcore.codecs.codec import Codec, CodecKey, Floating, Values
from fedcore.errors import PlanError
from fedcore.params import Size

MOST_BLOCK = 1 << 20


class Rotation(Codec, frozen=True, tag="rotation"):
    """An orthogonal map: it keeps the number of values, every inner product and every L2 norm.

    block: B, a power of two. Blocks are rotated in order. There is no padding: the last block ends where the segment
    ends, so it may overlap the one before.
    """

    block: Size

    @classmethod
    def of(cls, size: int) -> Rotation:
        """The rotation of a segment with as many values as possible in one block, up to 2²⁰."""
        return cls(1 << min(max(size, 1), MOST_BLOCK).bit_length() - 1)

    def coded_size(self, size: int) -> int:
        """Raises PlanError unless the block is a power of two and no longer than the segment."""
        power_of_two = self.block > 0 and self.block & self.block - 1 == 0
        if not power_of_two or self.block > max(size, 1):
            raise PlanError(f"a rotation in blocks of {self.block}; {size} values need a power of two up to {size}")
        return size

    def encode(self, values_V: Values[Floating], key: CodecKey) -> Values[Floating]:
        """Rotate every block."""
        rotated_V = values_V.copy()
        signs = self._signs(values_V.size, key)
        for begin, signs_B in zip(self._begins(values_V.size), signs, strict=True):
            block = rotated_V[begin : begin + self.block]
            block *= signs_B
            _transform(block)
        return rotated_V

    def decode(self, coded_C: Values[Floating], size: int, key: CodecKey) -> Values[Floating]:
        """Rotate back, the last block first."""
        values_V = coded_C.copy()
        signs = self._signs(size, key)
        for begin, signs_B in zip(reversed(self._begins(size)), signs[::-1], strict=True):
            block = values_V[begin : begin + self.block]
            _transform(block)
            block *= signs_B
        return values_V

    def _begins(self, size: int) -> list[int]:
        whole = range(0, size - self.block + 1, self.block)
        return [*whole, size - self.block] if size % self.block else [*whole]

    def _signs(self, size: int, key: CodecKey) -> Values[np.float32]:
        blocks = -(-size // self.block)
        return key.signs(blocks * self.block).astype(np.float32).reshape(blocks, self.block)


def _transform(block_B: Values[Floating]) -> None:
    """The Walsh–Hadamard transform of a block in place, divided by √B: its own inverse.

    Sums and differences at distances 1, 2, 4, … B/2, each rounded once: so every language gives the same bits.
    """
    half = 1
    while half < block_B.size:
        pairs = block_B.reshape(-1, 2, half)
        left, right = pairs[:, 0], pairs[:, 1]
        total = left + right
        np.subtract(left, right, out=right)
        left[:] = total
        half *= 2
    block_B *= block_B.dtype.type(block_B.size**-0.5)
