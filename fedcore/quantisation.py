"""Quantisation of unencrypted reports: few bits per value, rounded at random so that the mean is unbiased.

Spec: docs/spec/plan.md §5.2. Source: Suresh, Yu, Kumar, McMahan, "Distributed mean estimation with limited
communication", ICML 2017, §2.2. In a secure round values are fixed-point numbers already (`secagg.packing`).

Legend: L values of a report, C those of a segment, in blocks of BLOCK, the last of which may be shorter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcore.batching import StreamKey, stream
from fedcore.errors import ReportError
from fedcore.params import FLOAT_BYTES, Float32
from fedcore.report import ReportLayout, Segment

BLOCK = 1024
_RANGE_BYTES = 2 * FLOAT_BYTES
_LABEL = b"muster.quantise.v1"


def upload_bytes(layout: ReportLayout) -> int:
    """Bytes of an unencrypted report, quantised or not, without the header of a float32 file."""
    return sum(_size(segment, layout.bits) for segment in layout.segments)


def quantise(layout: ReportLayout, report_L: Float32, key: StreamKey) -> bytes:
    """The upload body of a weighted report: `layout.bits` per value of a mean segment without a range, all others in
    full precision.

    key: of the device's random streams; a simulation with the same key rounds the same way. Raises ReportError when the
    range of a block is beyond float32.
    """
    parts = []
    for index, (segment, where) in enumerate(layout.slices()):
        values_C = report_L[where].astype("<f4")
        if segment.normed:
            words = stream(_LABEL, key.seed, key.round, key.slot, index, words=-(-values_C.size // 2))
            uniform_C = words.astype("<u8").view("<u4")[: values_C.size] / 2.0**32
            parts.append(_quantised(values_C, uniform_C, layout.bits))
        else:
            parts.append(values_C.tobytes())
    return b"".join(parts)


def dequantise(data: memoryview, layout: ReportLayout) -> Float32:
    """The weighted report (L,) in the body of an upload. Raises ReportError for another length.

    Its numbers may be anything that the device sent, even not finite; `ReportLayout.check` checks them.
    """
    if len(data) != upload_bytes(layout):
        raise ReportError(f"a report of this plan has {upload_bytes(layout)} bytes, not {len(data)}")
    report_L, begin = np.empty(layout.size, np.float32), 0
    for segment, where in layout.slices():
        size = _size(segment, layout.bits)
        part = data[begin : begin + size]
        begin += size
        if segment.normed:
            with np.errstate(over="ignore", invalid="ignore"):
                report_L[where] = _values(part, segment.coded_size, layout.bits)
        else:
            report_L[where] = np.frombuffer(part, "<f4")
    return report_L


def _size(segment: Segment, bits: int) -> int:
    count = segment.coded_size
    if not bits or not segment.normed:
        return FLOAT_BYTES * count
    return _RANGE_BYTES * -(-count // BLOCK) + -(-count * bits // 8)


def _quantised(values_C: Float32, uniform_C: NDArray[np.float64], bits: int) -> bytes:
    """The least value and the step of every block, then all codes; the first code is in the lowest bits of a byte."""
    begins, most = np.arange(0, values_C.size, BLOCK), (1 << bits) - 1
    if not begins.size:
        return b""
    low_B = np.minimum.reduceat(values_C, begins)
    width_B = np.maximum.reduceat(values_C, begins).astype(np.float64) - low_B
    with np.errstate(over="ignore"):
        step_B = (width_B / most).astype("<f4")
    if not np.isfinite(step_B).all():
        raise ReportError("the values of a block are too far apart to be quantised")
    whole_B = np.where(step_B > 0, step_B, 1).astype(np.float64)
    low_C, step_C = (_spread(per_block_B, values_C.size) for per_block_B in (low_B.astype(np.float64), whole_B))
    codes_C = np.minimum(np.floor((values_C - low_C) / step_C + uniform_C), most).astype(np.uint8)
    per_byte = 8 // bits
    padded = np.zeros(-(-codes_C.size // per_byte) * per_byte, np.uint8)
    padded[: codes_C.size] = codes_C
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed = np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1)
    ranges = np.stack([low_B, step_B], axis=1)
    return ranges.tobytes() + bytes(packed)


def _values(part: memoryview, count: int, bits: int) -> Float32:
    blocks = -(-count // BLOCK)
    ranges = np.frombuffer(part[: _RANGE_BYTES * blocks], "<f4").reshape(blocks, 2).astype(np.float64)
    packed = np.frombuffer(part[_RANGE_BYTES * blocks :], np.uint8)
    shifts, most = np.arange(0, 8, bits, dtype=np.uint8), np.uint8((1 << bits) - 1)
    codes_C = (packed[:, None] >> shifts & most).reshape(-1)[:count]
    low_C, step_C = (_spread(per_block_B, count) for per_block_B in ranges.T)
    return (low_C + step_C * codes_C).astype(np.float32)


def _spread(of_blocks: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Repeat a number of each block for each of its values: (count,)."""
    return np.repeat(of_blocks, BLOCK)[:count]
