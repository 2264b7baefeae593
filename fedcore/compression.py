"""Smaller reports: the codecs that follow from what a user asks, and quantisation to few bits per value.

`rotation,subsample=0.25,bits=4` are steps in the order in which a device takes them. Guide: docs/compression.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fedcore.batching import StreamKey, stream
from fedcore.codecs import AnyCodec, CountSketch, LowRank, Rotation, Subsample, coded_sizes
from fedcore.errors import CompressionError, ReportError
from fedcore.params import FLOAT_BYTES, Float32, ParamSchema
from fedcore.plan import Plan
from fedcore.report import ReportLayout, Segment
from fedcore.validation import offered

LEAST_SIZE = 64
"""Segments with fewer values, such as the counts and norms of some algorithms, travel unchanged."""
SKETCH_ROWS = 3
NO_SUMS = {
    "top_k": "every device would choose other places, and only values of the same place add up",
    "error_feedback": "what a device left out would come rounds later, and most devices never come back",
}


@dataclass(frozen=True, slots=True)
class Step:
    """A step that a compression may have.

    number: a description of the number after the step's name; "" if there is none. allowed: whether a number is valid.
    make: the codec of a segment, from its size, the number and the model's schema; None for `bits`, which is no codec.
    """

    number: str
    allowed: Callable[[float], bool]
    make: Callable[[int, float, ParamSchema], AnyCodec] | None = None


def _low_rank(size: int, rank: float, schema: ParamSchema) -> LowRank:
    if size != schema.size:
        raise CompressionError(f"low_rank needs the tensors of a model; a segment has {size} values, not {schema.size}")
    shapes = (tensor.shape if len(tensor.shape) > 1 else (tensor.size, 1) for tensor in schema.tensors)
    return LowRank(int(rank), tuple((shape[0], math.prod(shape[1:])) for shape in shapes))


STEPS = {
    "rotation": Step("", math.isnan, lambda size, _, schema: Rotation.of(size)),
    "subsample": Step(
        "a fraction above 0 and below 1, of the values that travel",
        lambda fraction: 0 < fraction < 1,
        lambda size, fraction, _: Subsample(math.ceil(fraction * size)),
    ),
    "count_sketch": Step(
        "a fraction above 0 and below 1: counters for each value",
        lambda fraction: 0 < fraction < 1,
        lambda size, fraction, _: CountSketch(SKETCH_ROWS, max(1, int(fraction * size / SKETCH_ROWS))),
    ),
    "low_rank": Step("a whole number of 1 or more", lambda rank: rank >= 1 and rank.is_integer(), _low_rank),
    "bits": Step("1, 2, 4 or 8 for each unencrypted value", lambda bits: bits in {1, 2, 4, 8}),
}


@dataclass(frozen=True, slots=True)
class Compression:
    """Steps in their order: each a name of STEPS and its number, NaN for none. Raises CompressionError."""

    steps: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for place, (name, number) in enumerate(self.steps):
            if name in NO_SUMS:
                raise CompressionError(f"{name} does not commute with sums: {NO_SUMS[name]}; take {', '.join(STEPS)}")
            if name not in STEPS:
                raise CompressionError(f"no compression is called {name!r}; {offered(name, STEPS)}")
            step = STEPS[name]
            if not step.allowed(number):
                wanted = f"{name}=NUMBER, {step.number}" if step.number else f"{name} without a number"
                raise CompressionError(f"write {wanted}, not {number:g}")
            if name == "low_rank" and place > 0:
                raise CompressionError("low_rank comes first: the steps before it leave no matrices")
            if name == "bits" and place + 1 < len(self.steps):
                raise CompressionError("bits come last: the other steps are for numbers, which codes are not")

    @classmethod
    def parse(cls, text: str) -> Compression:
        """The compression that a user wrote; an empty text means none. Raises CompressionError."""
        steps = []
        for step in filter(None, (part.strip() for part in text.split(","))):
            name, _, number = step.partition("=")
            try:
                steps.append((name.strip(), float(number) if number else math.nan))
            except ValueError as error:
                raise CompressionError(f"{step}: {number!r} is not a number") from error
        return cls(tuple(steps))

    def __str__(self) -> str:
        """The steps as `parse` reads them."""
        numbers = {name: repr(number).removesuffix(".0") for name, number in self.steps if not math.isnan(number)}
        return ",".join(f"{name}={numbers[name]}" if name in numbers else name for name, _ in self.steps)

    def codecs(self, size: int, schema: ParamSchema) -> tuple[AnyCodec, ...]:
        """The codecs of a mean segment with `size` values, of an algorithm on a model of that schema.

        Raises CompressionError when low-rank factors do not fit the segment.
        """
        chain: tuple[AnyCodec, ...] = ()
        for name, number in self.steps if size >= LEAST_SIZE else ():
            if (make := STEPS[name].make) is not None:
                chain = (*chain, make(coded_sizes(chain, size)[-1], number, schema))
        return chain

    @property
    def bits(self) -> int:
        """Bits of an unencrypted value; 0 for float32."""
        return int(dict(self.steps).get("bits", 0))

    def coded(self, layout: ReportLayout, schema: ParamSchema) -> ReportLayout:
        """The layout with these codecs for its mean segments, but those with ranges. Raises CompressionError."""
        segments = (
            replace(segment, codecs=self.codecs(segment.size, schema)) if segment.normed else segment
            for segment in layout.segments
        )
        return replace(layout, segments=tuple(segments), bits=self.bits)

    def applied(self, plan: Plan) -> Plan:
        """The plan with the layouts of all its trips coded. Raises CompressionError."""
        second = plan.second and replace(plan.second, report=self.coded(plan.second.report, plan.schema))
        return replace(plan, report=self.coded(plan.report, plan.schema), second=second)


# Quantisation of unencrypted reports: few bits per value, rounded at random so that the mean is unbiased.
#
# Spec: docs/spec/plan.md §5.2. Source: Suresh, Yu, Kumar, McMahan, "Distributed mean estimation with limited
# communication", ICML 2017, §2.2. In a secure round values are fixed-point numbers already (`secagg.packing`).
#
# Legend: L values of a report, C those of a segment, in blocks of BLOCK, the last of which may be shorter.


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
