"""Derivations of a secure round that both ends make alike: hashes, layout, weight. Spec: docs/spec/wire.md §8.

Secure aggregation sums a weight and a vector: the unweighted values of a report. They are multiplied by the weight on
the way to fixed-point numbers (`secagg.packing`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.plan import BlobRef
from fedcore.release import SumBounds
from fedcore.report import WEIGHT, ReportLayout

# Metric sums are fixed-point numbers with three bits behind the point: counts are exact, and sums reach 65,535.
METRIC_BITS, METRIC_STEP = 20, 0.125


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """How the values of a segment become fixed-point numbers of `bits` in [low, high]; the rest as in a session's.

    norm: the L2 norm to which a longer segment is scaled down; 0 is no limit. weighted: multiplied by the weight.
    """

    size: int
    bits: int
    low: float
    high: float
    norm: float
    weighted: bool


def fixed_points(layout: ReportLayout, bounds: SumBounds) -> tuple[FixedPoint, ...]:
    """The fixed-point numbers of every unweighted segment of a report: plan and release leave no choice."""
    clip, half = bounds.clip_norm, 1 << METRIC_BITS - 1
    lowest, highest = -half * METRIC_STEP, (half - 1) * METRIC_STEP
    return tuple(
        FixedPoint(one.coded_size, bounds.bits, -clip, clip, clip, weighted=True)
        if one.reduction == "mean"
        else FixedPoint(one.size, METRIC_BITS, lowest, highest, 0.0, weighted=False)
        for one in layout.unweighted
    )


def greatest_weight(layout: ReportLayout, bounds: SumBounds) -> int:
    """The weight that a device counts with at most: 1 when all count alike."""
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
    """The model that masks are bound to, 32 bytes: with another plan or checkpoint they do not cancel out."""
    return hashlib.sha256(bytes.fromhex(plan.sha256) + bytes.fromhex(checkpoint.sha256)).digest()


def layout_hash(layout: ReportLayout) -> bytes:
    """The digest of a report layout, 32 bytes."""
    return hashlib.sha256(msgspec.json.encode(layout)).digest()


def reunite(layout: ReportLayout, weight: int, sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The summed report, float64 (L,), of a sum of weights and the sums of the vector's values."""
    total_L, begin = [], 0
    for segment in layout.segments:
        if segment.name == WEIGHT:
            total_L.append(np.array([weight], np.float64))
            continue
        total_L.append(sums[begin : begin + segment.coded_size])
        begin += segment.coded_size
    return np.concatenate(total_L)
