"""Derived values of a secure round, the same at both ends: hashes, layout, weight. Spec: docs/spec/wire.md §8.

Secure aggregation sums a weight and a vector: the unweighted values of a report. They are multiplied by the weight on
the way to fixed-point numbers (`secagg.packing`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import log, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.codecs.rotation import Rotation
from fedcore.codecs.subsample import Subsample
from fedcore.params import Float32
from fedcore.plan import BlobRef
from fedcore.release import SumBounds
from fedcore.report import WEIGHT, ReportLayout, Segment

# Metric sums are fixed-point numbers with three bits behind the point: counts are exact, and sums reach 65,535.
METRIC_BITS, METRIC_STEP = 20, 0.125
CLAMPED_BITS = 10
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
    """The fixed-point formats of all values that a round sums. Plan and release determine them.

    With noise, all mean segments are treated as one: they are scaled down together, and 0 is one of the steps.
    """
    clip = bounds.clip_norm
    if bounds.noise_multiplier:
        means = [segment for segment in layout.unweighted if segment.reduction == "mean"]
        half = 1 << bounds.bits - 1
        step = max(_reach(segment, clip) for segment in means) / (half - 1)
        values = sum(segment.coded_size for segment in means)
        return (FixedPoint(values, bounds.bits, -half * step, (half - 1) * step, clip, weighted=True),)
    half = 1 << METRIC_BITS - 1
    lowest, highest = -half * METRIC_STEP, (half - 1) * METRIC_STEP
    return tuple(
        FixedPoint(segment.coded_size, bounds.bits, -_reach(segment, clip), _reach(segment, clip), clip, weighted=True)
        if segment.reduction == "mean"
        else FixedPoint(segment.size, METRIC_BITS, lowest, highest, 0.0, weighted=False)
        for segment in layout.unweighted
    )


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
    """The values of a report (V,) that a round sums. With noise there are no metrics, as nothing would hide them."""
    if not bounds.noise_multiplier:
        return values_V
    parts, begin = [], 0
    for segment in layout.unweighted:
        if segment.reduction == "mean":
            parts.append(values_V[begin : begin + segment.coded_size])
        begin += segment.coded_size
    return np.concatenate(parts)


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
    """
    key = seed.to_bytes(8, "little") if layout.has_codecs else b""
    return hashlib.sha256(msgspec.json.encode(layout) + key).digest()


def join_weight(layout: ReportLayout, weight: int, sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The summed report, float64 (L,), of a sum of weights and the sums of values, with zeros for metrics left out."""
    total_L, begin, whole = [], 0, sums.size == layout.size - 1
    for segment in layout.segments:
        if segment.name == WEIGHT:
            total_L.append(np.array([weight], np.float64))
        elif segment.reduction == "sum" and not whole:
            total_L.append(np.zeros(segment.size))
        else:
            total_L.append(sums[begin : begin + segment.coded_size])
            begin += segment.coded_size
    return np.concatenate(total_L)
