"""Parts of the vectors of a device: fixed inputs, packed words, noise, graph parameters and ranges."""

from __future__ import annotations

import hashlib
import secrets
from unittest.mock import patch

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from fedcore import masking
from fedcore.codecs import Rotation
from fedcore.report import ReportLayout, Segment
from fedcore.schedule import Range
from secagg import packing, parameters
from secagg.errors import PolicyViolation
from secagg.packing import PackedSegment

SEED = 2**53 + 3
"""A seed that a double cannot hold."""


def private(seed):
    return Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def values(size, seed=5):
    """Float32 values that any language can make again: (i · 40503 mod 65537) / 8192 − 4."""
    return ((np.arange(seed, seed + size) * 40503 % 65537) / 8192 - 4).astype(np.float32)


def digest(data):
    return hashlib.sha256(data).hexdigest()


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


PACKINGS = {
    "two kinds": (
        (PackedSegment(5, 21, 14, -1.0, 1.0, norm=1.5, weighted=True), PackedSegment(3, 16, 8, 0.0, 255.0)),
        [-2.0, 0.25, -0.5, 0.125, 1.75, 7, 255, 0], 11, 64,
    ),
    "fields of 26 bits": ((PackedSegment(70, 26, 20, -10.0, 10.0, norm=10.0, weighted=True),), None, 3, 100),
    "fields of 32 bits": ((PackedSegment(33, 32, 20, -65536.0, 65535.875),), None, 0, 1),
    "a plane of several slices": ((PackedSegment(70_000, 24, 12, -3.0, 3.0),), None, 1, 1),
    "noise": ((PackedSegment(50, 24, 10, -512.0, 511.0, 300.0, weighted=True, noise=900),), None, 1, 1),
    "noise below 0 in narrow fields": ((PackedSegment(7, 11, 2, -2.0, 1.0, 1.0, noise=1000),), [0] * 7, 1, 1),
    "noise over several slices": ((PackedSegment(70_000, 32, 8, -12.8, 12.7, 9.0, noise=3),), None, 1, 1),
    "ranges": PACKING,
    "an empty segment": ((PackedSegment(0, 24, 12, -3.0, 3.0), PackedSegment(2, 24, 12, -3.0, 3.0)), [3, -3], 1, 1),
}  # fmt: skip


def noise_shares():
    """The noise of a device, by the segment, the noise multiplier, and how many devices are counted on."""
    segments = [
        PackedSegment(1_000_000, 0, 16, -32768 / 32767, 1.0, 1.0), PackedSegment(1, 0, 2, -20.0, 10.0, 10.0),
    ]  # fmt: skip
    return [
        [
            [segment.size, segment.in_bits, segment.low, segment.high, segment.norm], multiplier, honest,
            packing.with_noise(segment, multiplier, honest).noise,
        ]
        for segment in segments
        for multiplier, honest in ((1.0, 5), (0.37, 70), (6.5, 47))
    ]  # fmt: skip


def packings():
    """Words under a stream key of 32 bytes 7, by digest. Vectors that are not given are `values`."""
    for name, (segments, fixed, weight, w_max) in PACKINGS.items():
        vector = values(sum(segment.size for segment in segments)) if fixed is None else np.array(fixed, np.float32)
        with patch.object(secrets, "token_bytes", lambda size: bytes([7]) * size):
            words = packing.encode(segments, vector, weight, w_max)
        yield {
            "name": name, "vector": fixed, "weight": weight, "w_max": w_max, "words": words.size,
            "segments": [
                [
                    segment.size, segment.field_bits, segment.in_bits, segment.low, segment.high, segment.norm,
                    segment.weighted, segment.noise,
                ]
                for segment in segments
            ],
            "sha256": digest(words.astype("<u8").tobytes()),
        }  # fmt: skip


def cohorts():
    """Numbers n, k and t, and whether a device accepts them."""
    for n in (7, 8, 9, 16, 64, 65, 100, 1000, 1 << 20, (1 << 20) + 1):
        best = parameters.find(n) if 8 <= n <= 1 << 20 else parameters.GraphParameters(n, n - 1, n - 1)
        for k, t in (
            (best.k, best.t),
            (best.k, best.t - 1),
            (best.k - 1, best.t),
            (n - 1, n - 1),
            (best.k, best.k + 1),
        ):
            if n < 1 << 20 or k <= parameters.MOST_NEIGHBOURS:
                yield [n, k, t, accepted(n, k, t)]


def accepted(n, k, t):
    try:
        parameters.check(parameters.GraphParameters(n, k, t))
    except PolicyViolation:
        return False
    return True
