"""The vectors of packed words, noise and graph parameters, a part of tools/make_device_vectors.py."""

import secrets
from unittest.mock import patch

import numpy as np

from secagg import packing, parameters
from secagg.errors import PolicyViolation
from secagg.packing import PackedSegment
from tools.range_vectors import PACKING
from tools.vector_inputs import digest, values

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
