"""What both ends of a secure round derive alike from task, plan, checkpoint and report. Spec: docs/spec/wire.md §8.

Secure aggregation sums a weight and a vector. The vector is the report without its weight, and mean segments in it are
not multiplied by the weight yet: that happens on the way to fixed-point numbers.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.params import Float32
from fedcore.plan import BlobRef
from fedcore.report import WEIGHT, ReportLayout, Segment


def task_hash(task: str) -> bytes:
    """How an invitation names a task, 32 bytes."""
    return hashlib.sha256(task.encode()).digest()


def session_number(number: int, attempt: int) -> int:
    """The number of one attempt at a round; it grows with both, so that no attempt can be mistaken for an older one."""
    return number << 32 | attempt


def model_hash(plan: BlobRef, checkpoint: BlobRef) -> bytes:
    """What the masks are bound to, 32 bytes: devices that run another plan or start elsewhere do not cancel out."""
    return hashlib.sha256(bytes.fromhex(plan.sha256) + bytes.fromhex(checkpoint.sha256)).digest()


def layout_hash(layout: ReportLayout) -> bytes:
    """The digest of a report layout, 32 bytes."""
    return hashlib.sha256(msgspec.json.encode(layout)).digest()


def masked_segments(layout: ReportLayout) -> tuple[Segment, ...]:
    """The segments of the vector, in order: all but the weight."""
    return tuple(segment for segment in layout.segments if segment.name != WEIGHT)


def separate(layout: ReportLayout, report_L: Float32) -> tuple[Float32, int]:
    """A report's vector, mean segments divided by the weight again, and its weight."""
    parts = layout.split(report_L)
    vector = [parts[segment.name] for segment in masked_segments(layout)]
    return np.concatenate(vector, dtype=np.float32), int(parts[WEIGHT][0])


def reunite(layout: ReportLayout, weight: int, sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The summed report, float64 (L,), of a sum of weights and the sums of the vector's values."""
    total_L, begin = [], 0
    for segment in layout.segments:
        if segment.name == WEIGHT:
            total_L.append(np.array([weight], np.float64))
            continue
        total_L.append(sums[begin : begin + segment.size])
        begin += segment.size
    return np.concatenate(total_L)
