"""Codecs: linear maps between a report as a graph makes it and as it travels. They commute with sums.

Spec: docs/spec/plan.md §5.1. A segment names its codecs in the order in which a device applies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from fedcore.codecs.codec import CodecKey, Floating, RoundKey, Values
from fedcore.codecs.count_sketch import CountSketch
from fedcore.codecs.low_rank import LowRank
from fedcore.codecs.rotation import Rotation
from fedcore.codecs.subsample import Subsample

AnyCodec: TypeAlias = Rotation | Subsample | CountSketch | LowRank
"""A codec as a plan has it: its member `codec` says which."""


def coded_sizes(codecs: Sequence[AnyCodec], size: int) -> list[int]:
    """The numbers of values before, between and after the codecs. Raises PlanError when one of them does not fit."""
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
    """The values (V,) with V = `size`, of a sum of what travelled: the codecs undone, the last one first."""
    sizes = coded_sizes(codecs, size)
    for place in reversed(range(len(codecs))):
        coded_C = codecs[place].decode(coded_C, sizes[place], CodecKey(key, segment, place))
    return coded_C
