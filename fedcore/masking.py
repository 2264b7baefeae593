"""Derivations of a secure round that both ends make alike: hashes, layout, weight. Spec: docs/spec/wire.md §8.

Secure aggregation sums a weight and a vector: the unweighted values of a report. They are multiplied by the weight on
the way to fixed-point numbers (`secagg.packing`).
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.plan import BlobRef
from fedcore.report import WEIGHT, ReportLayout


def task_hash(task: str) -> bytes:
    """The name of a task in an invitation, 32 bytes."""
    return hashlib.sha256(task.encode()).digest()


def session_number(number: int, attempt: int) -> int:
    """The number of one attempt at a round; it grows with both, so that no attempt can be mistaken for an older one."""
    return number << 32 | attempt


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
        total_L.append(sums[begin : begin + segment.size])
        begin += segment.size
    return np.concatenate(total_L)
