"""Codecs: linear maps between a report as a graph makes it and as it travels. They commute with sums.

Spec: docs/spec/plan.md §5.1. A segment names its codecs in the order in which a device applies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcore.codecs.codec import CodecKey, CountSketch, Floating, LowRank, Rotation, RoundKey, Subsample, Values

AnyCodec: TypeAlias = Rotation | Subsample | CountSketch | LowRank
"""A codec as a plan has it: its member `codec` says which."""
MOST_CODECS = 8
"""The most codecs of a segment: each goes over all of its values, on every device and in the coordinator's driver."""


def coded_sizes(codecs: Sequence[AnyCodec], size: int) -> list[int]:
    """The number of values before, between and after the codecs. Raises PlanError when a codec does not fit."""
    sizes = [size]
    for codec in codecs:
        sizes.append(codec.coded_size(sizes[-1]))
    return sizes


def encode(codecs: Sequence[AnyCodec], values_V: Values[Floating], key: RoundKey, segment: int) -> Values[Floating]:
    """The values (C,) that travel. segment: the index of the values' segment in its layout."""
    for place, codec in enumerate(codecs):
        values_V = codec.encode(values_V, CodecKey(key, segment, place))
    return values_V


def decode(
    codecs: Sequence[AnyCodec], coded_C: Values[Floating], size: int, key: RoundKey, segment: int
) -> Values[Floating]:
    """Undo the codecs of a sum, the last one first: values (V,) with V = `size`."""
    return _undone(codecs, 0, coded_C, size, key, segment)


def keep_norms(codecs: Sequence[AnyCodec]) -> bool:
    """Whether what travels has the L2 norm of what it is decoded to."""
    return all(isinstance(codec, Rotation) for codec in codecs)


def stretch(codecs: Sequence[AnyCodec]) -> float:
    """The mean factor by which encoding lengthens values; 1 if it never does."""
    return prod(sqrt(codec.rows) for codec in codecs if isinstance(codec, CountSketch))


def growth(codecs: Sequence[AnyCodec], size: int) -> float:
    """The factor by which decoding raises the squared L2 norm of values: `Codec.growth` of all codecs."""
    return prod(codec.growth(before) for codec, before in zip(codecs, coded_sizes(codecs, size), strict=False))


def decoded_norm(
    codecs: Sequence[AnyCodec], coded_C: NDArray[np.float64], size: int, key: RoundKey, segment: int
) -> float:
    """The L2 norm of what `decode` gives."""
    # Leading rotations keep the norm.
    first = next((place for place, codec in enumerate(codecs) if not keep_norms([codec])), len(codecs))
    return float(np.linalg.norm(_undone(codecs, first, coded_C, size, key, segment)))


def _undone(
    codecs: Sequence[AnyCodec], first: int, coded_C: Values[Floating], size: int, key: RoundKey, segment: int
) -> Values[Floating]:
    """Undo the codecs from `first` on, the last one first."""
    sizes = coded_sizes(codecs, size)
    for place in reversed(range(first, len(codecs))):
        coded_C = codecs[place].decode(coded_C, sizes[place], CodecKey(key, segment, place))
    return coded_C
