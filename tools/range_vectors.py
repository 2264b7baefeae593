"""The vectors of segments with ranges, a part of those of a device (tools/make_device_vectors.py)."""

import msgspec
import numpy as np
from msgspec.structs import replace

from fedcore import masking
from fedcore.codecs.codec import Rotation
from fedcore.ranges import Range
from fedcore.report import ReportLayout, Segment
from secagg.packing import PackedSegment

RANGED = ReportLayout(
    (
        Segment("delta", 4, "mean", range=Range(-1.1, 2.7, 20)),
        Segment("weight", 1, "sum"),
        Segment("train.metrics", 2, "sum", ("examples", "loss"), range=Range(0, 2**20 - 1, 20)),
        Segment("plain.metrics", 3, "sum", ("examples", "loss", "correct")),
    ),
    "uniform",
)
PACKING = (
    (
        PackedSegment(6, 26, 20, 0.0, 1.0), PackedSegment(4, 6, 1, 0.0, 1.0),
        PackedSegment(3, 26, 20, -5.0, 2.0**20 - 6.0), PackedSegment(3, 32, 20, -1e30, 1e29),
    ),
    [0.1, 1, 0, 0.5, -1, 7, 1, 0, 1, 0.5, 1_048_570, -5, 77, -1e30, 1e30, 0], 1, 1,
)  # fmt: skip


def fixed_points(layout, bounds):
    """The formats as rows of numbers."""
    return [
        [point.size, point.bits, point.low, point.high, point.norm, point.weighted]
        for point in masking.fixed_points(layout, bounds)
    ]


def ranged(bounds, noisy, seed):
    """A layout with ranges: formats, hash, and values that are summed, also of sums that are far too long."""
    of_device = np.array([0.5, 2.7, -1.1, 0, 7, 1e6, 3.25, -1e-7, 123_456.789, 2**24 + 2, -3e38, 1e-3], np.float32)
    wide = replace(RANGED, segments=(*RANGED.segments, Segment("more.metrics", 3, "sum", ("examples", "a", "b"))))
    return {
        "layout": msgspec.to_builtins(wide), "layout_hash": masking.layout_hash(wide, seed).hex(),
        "fixed_points": fixed_points(wide, bounds), "noisy_fixed_points": fixed_points(wide, noisy),
        "values": of_device.tobytes().hex(), "summed": masking.summed_values(wide, bounds, of_device).tobytes().hex(),
        "noisy_summed": masking.summed_values(wide, noisy, of_device).tobytes().hex(),
    }  # fmt: skip


def refused_layouts():
    """Layouts that no device may take, by what is wrong with their ranges."""
    good = {"low": -1.0, "high": 1.0, "bits": 20}
    wrong = {
        "no bits": {"bits": 0}, "too many bits": {"bits": 21}, "bits that are no number": {"bits": 1.5},
        "upside down": {"low": 1.0, "high": -1.0}, "above 0": {"low": 0.5}, "below 0": {"high": -0.5},
        "empty": {"low": 0.0, "high": 0.0}, "too narrow": {"low": 0.0, "high": 1e-31}, "too wide": {"high": 1e31},
        "no number": {"high": None}, "a text": {"low": "NaN"},
    }  # fmt: skip
    plain = msgspec.to_builtins(RANGED)
    for name, members in wrong.items():
        yield name, _with(plain, 0, range={**good, **members})
    yield "null", _with(plain, 0, range=None)
    yield "of the weight", _with(plain, 1, range=good)
    yield "of a mean by examples", {**plain, "weighting": "examples"}
    yield "of a coded segment", _with(plain, 0, codecs=msgspec.to_builtins((Rotation(4),)))
    yield "of a clipped report", {**plain, "segments": plain["segments"][:2], "bounded": True}


def _with(layout, place, **members):
    """The layout with members of a segment changed."""
    segments = list(layout["segments"])
    segments[place] = {**segments[place], **members}
    return {**layout, "segments": segments}
