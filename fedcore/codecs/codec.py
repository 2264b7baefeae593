"""The contract of a codec: a linear map that makes a segment of a report smaller, or easier to quantise.

Spec: docs/spec/plan.md §5.1. A device encodes its values before they are weighed; the coordinator decodes their sum.

Legend: V values of a segment as the report graph makes them, C values that travel.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.streams import Words, stream

Floating = TypeVar("Floating", np.float32, np.float64)
Values: TypeAlias = NDArray[Floating]

_LABEL = b"muster.codec.v1"


class RoundKey(msgspec.Struct, frozen=True):
    """The public key of a round's codecs, the same for all its devices: the task's seed and the round's number."""

    seed: int
    round: int


class CodecKey(msgspec.Struct, frozen=True):
    """The key of one codec in one round: its segment's index in the layout, and its own index in the segment."""

    round: RoundKey
    segment: int
    place: int

    def words(self, count: int) -> Words:
        """The first 64-bit words of the codec's random stream."""
        return stream(_LABEL, self.round.seed, self.round.round, self.segment, self.place, words=count)

    def signs(self, count: int) -> NDArray[np.int8]:
        """Random signs (count,), +1 where a bit is 0 and −1 where it is 1; bits come lowest first out of each word."""
        bits = np.unpackbits(self.words(-(-count // 64)).astype("<u8").view(np.uint8), count=count, bitorder="little")
        return 1 - 2 * bits.view(np.int8)


class Codec(msgspec.Struct, frozen=True, tag_field="codec"):
    """A linear map from V values to C, which depends on nothing but its settings and a public key.

    Both ways keep the values' precision, float32 or float64. Where C < V, decode∘encode is unbiased: over random keys,
    its mean is the identity.
    """

    def coded_size(self, size: int) -> int:
        """C of a segment with V = `size`. Raises PlanError when such a segment cannot be encoded."""
        raise NotImplementedError

    def growth(self, size: int) -> float:
        """The mean factor by which decoding raises the squared L2 norm of V = `size` values.

        If some values grow more than others, the factor is that of the values that grow most.
        """
        return size / max(1, self.coded_size(size))

    def encode(self, values_V: Values[Floating], key: CodecKey) -> Values[Floating]:
        """The values that a device sends instead of its own: float (C,)."""
        raise NotImplementedError

    def decode(self, coded_C: Values[Floating], size: int, key: CodecKey) -> Values[Floating]:
        """The estimate of a sum of values, float (V,) with V = `size`, from the sum of the coded values."""
        raise NotImplementedError
