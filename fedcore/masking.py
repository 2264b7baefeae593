"""Derived values of a secure round, the same at both ends: hashes, layout, weight. Spec: docs/spec/wire.md §8.

Secure aggregation sums a weight and a vector: the unweighted values of a report. They are multiplied by the weight on
the way to fixed-point numbers (`secagg.packing`).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from math import log, sqrt

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray

from fedcore.codecs import Rotation, Subsample
from fedcore.params import Float32
from fedcore.plan import BlobRef
from fedcore.release import SumBounds
from fedcore.report import WEIGHT, ReportLayout, Segment

METRIC_BITS, METRIC_UNIT, METRIC_STEP = 20, 16, 2.0**-14
"""A sum without a range is sent as two numbers of METRIC_BITS: whole units, and the rest in steps. It reaches 2^23,
above which float32 has whole numbers alone, and is off by a step at most. Up to there counts are exact."""
CLAMPED_BITS = 10
_RANGE = struct.Struct("<QddB")
LN2 = log(2)


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """How the values of a segment become fixed-point numbers of `bits` in [low, high].

    norm: the L2 norm to which a longer segment is scaled down; 0 is no limit. weighted: multiplied by the weight.
    """

    size: int
    bits: int
    low: float
    high: float
    norm: float
    weighted: bool

    @property
    def step(self) -> float:
        """Difference between neighbouring numbers."""
        return (self.high - self.low) / ((1 << self.bits) - 1)


def fixed_points(layout: ReportLayout, bounds: SumBounds) -> tuple[FixedPoint, ...]:
    """The fixed-point formats of all values that a round sums, as `summed_values` has them. Plan and release determine
    them.

    With noise, all mean segments are treated as one, whatever their ranges: they are scaled down together, and 0 is one
    of the steps.
    """
    clip = bounds.clip_norm
    if bounds.noise_multiplier:
        means = [segment for segment in layout.unweighted if segment.reduction == "mean"]
        half = 1 << bounds.bits - 1
        step = max(_reach(segment, clip) for segment in means) / (half - 1)
        values = sum(segment.coded_size for segment in means)
        return (FixedPoint(values, bounds.bits, -half * step, (half - 1) * step, clip, weighted=True),)
    return tuple(point for segment in layout.unweighted for point in _formats(segment, bounds))


def _formats(segment: Segment, bounds: SumBounds) -> tuple[FixedPoint, ...]:
    """Those of a segment without noise: two of a sum without a range, which is split, else one."""
    within, half = segment.range, 1 << METRIC_BITS - 1
    if within is not UNSET:
        return (FixedPoint(segment.size, within.bits, within.low, within.high, 0.0, weighted=False),)
    if segment.reduction == "mean":
        return (fixed_point(segment, bounds),)
    steps = (1.0, METRIC_STEP)
    return tuple(
        FixedPoint(segment.size, METRIC_BITS, -half * step, (half - 1) * step, 0.0, weighted=False) for step in steps
    )


def fixed_point(segment: Segment, bounds: SumBounds) -> FixedPoint:
    """The fixed-point format of a mean segment that is held to `clip_norm`, without noise."""
    reach = _reach(segment, bounds.clip_norm)
    return FixedPoint(segment.coded_size, bounds.bits, -reach, reach, bounds.clip_norm, weighted=True)


def least_square(bits: int) -> int:
    """A lower bound, over all layouts, on the squared l2 norm of a report at the clip bound, in steps of `bits`."""
    return ((1 << bits - 1) - 1) ** 2


def _reach(segment: Segment, clip: float) -> float:
    """The greatest absolute value in a mean segment whose L2 norm is at most `clip`.

    Rotated values are all small: a value exceeds t with probability below 2 exp(−t² block / 2 clip²). So a report has a
    value beyond the returned bound with probability below 2^-10, and that value is clamped. Suresh, Yu, Kumar, McMahan
    2017, §4.
    """
    last = next((codec for codec in reversed(segment.codecs) if not isinstance(codec, Subsample)), None)
    if not isinstance(last, Rotation):
        return clip
    exponent = (CLAMPED_BITS + 1 + segment.coded_size.bit_length()) * LN2
    return clip * min(1.0, sqrt(2 * exponent / last.block))


def summed_values(layout: ReportLayout, bounds: SumBounds, values_V: Float32) -> Float32:
    """What a round sums of the values of a report (V,): sums without a range in two parts.

    With noise there are no metrics, as nothing would hide them.
    """
    parts, begin = [values_V[:0]], 0
    for segment in layout.unweighted:
        values = values_V[begin : begin + segment.coded_size]
        begin += segment.coded_size
        if _is_split(segment) and not bounds.noise_multiplier:
            units = np.trunc(values / METRIC_UNIT)
            parts += [units, values - METRIC_UNIT * units]
        elif segment.reduction == "mean" or not bounds.noise_multiplier:
            parts.append(values)
    return np.concatenate(parts)


def _is_split(segment: Segment) -> bool:
    return segment.reduction == "sum" and not segment.ranged


def greatest_weight(layout: ReportLayout, bounds: SumBounds) -> int:
    """The greatest weight of a device: 1 when all devices count equally."""
    return bounds.max_examples if layout.weighting == "examples" else 1


def task_hash(task: str) -> bytes:
    """The name of a task in an invitation, 32 bytes."""
    return hashlib.sha256(task.encode()).digest()


def session_number(number: int, attempt: int) -> int:
    """The number of one attempt at a round; it grows with both, so that no attempt can be mistaken for an older one."""
    return number << 32 | attempt


def last_session_number(number: int) -> int:
    """The greatest session number of a round: a device that answered it takes part in no other attempt."""
    return session_number(number, (1 << 32) - 1)


def model_hash(plan: BlobRef, checkpoint: BlobRef) -> bytes:
    """A hash of the model, 32 bytes, that masks depend on: with another plan or checkpoint they do not cancel out."""
    return hashlib.sha256(bytes.fromhex(plan.sha256) + bytes.fromhex(checkpoint.sha256)).digest()


def layout_hash(layout: ReportLayout, seed: int) -> bytes:
    """The digest of a report layout, 32 bytes. With codecs it covers the task's seed, which keys them.

    Otherwise a coordinator could give each device another key and so keep one device's values apart from the others'.
    Ranges are covered as bytes, since languages write the same number in different ways.
    """
    key = seed.to_bytes(8, "little") if layout.has_codecs else b""
    listed = replace(layout, segments=tuple(replace(segment, range=UNSET) for segment in layout.segments))
    ranges = [
        _RANGE.pack(index, within.low, within.high, within.bits)
        for index, segment in enumerate(layout.segments)
        if (within := segment.range) is not UNSET
    ]
    return hashlib.sha256(msgspec.json.encode(listed) + key + b"".join(ranges)).digest()


def join_weight(layout: ReportLayout, weight: int, sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The summed report, float64 (L,), of a sum of weights and the sums of `summed_values`; zeros where those left sums
    out.
    """
    total_L, begin = [], 0
    means = sum(segment.coded_size for segment in layout.unweighted if segment.reduction == "mean")
    left_out = sums.size == means
    for segment in layout.segments:
        end = begin + segment.coded_size
        if segment.name == WEIGHT:
            total_L.append(np.array([weight], np.float64))
        elif segment.reduction == "sum" and left_out:
            total_L.append(np.zeros(segment.size))
        elif _is_split(segment):
            total_L.append(METRIC_UNIT * sums[begin:end] + sums[end : end + segment.size])
            begin = end + segment.size
        else:
            total_L.append(sums[begin:end])
            begin = end
    return np.concatenate(total_L)
