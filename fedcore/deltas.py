"""Deltas between versions of a blob of float32 values, such as the checkpoints of two rounds: smaller, and exact.

Spec: docs/spec/params.md §4. Values change little from round to round, so the upper bytes of the difference of their
bit patterns are mostly zero. A delta puts these bytes side by side, and zstandard compresses them away.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from fedcore.errors import DeltaError, DigestMismatch
from fedcore.params import FLOAT_BYTES
from fedcore.plan import BlobRef

_BLOCK = 1 << 16
"""The number of values whose differences are computed at a time."""


def delta_between(base: bytes, target: bytes) -> bytes:
    """The delta that turns `base` into `target` (see `applied`). Raises DeltaError when they differ in length."""
    if len(base) != len(target):
        raise DeltaError(f"there is no delta between blobs of {len(base)} and {len(target)} bytes")
    words, before = _words(target), _words(base)
    planes = np.empty((FLOAT_BYTES, len(words)), np.uint8)
    for start in range(0, len(words), _BLOCK):  # so that temporary arrays stay small
        part = slice(start, start + _BLOCK)
        moved = (words[part] - before[part]).view("<i4")
        # Small moves up and down alike become small numbers: 0, −1, 1, −2, 2, …
        folded = moved << 1 ^ moved >> 31
        planes[:, part] = folded.view(np.uint8).reshape(-1, FLOAT_BYTES).T
    return zstandard.ZstdCompressor().compress(planes.reshape(-1).data)


def applied(delta: bytes, base: bytes, ref: BlobRef) -> bytes:
    """The blob that `ref` names, made from another one and the delta between them.

    Raises DeltaError when the delta is damaged, is for other blobs, or would decompress to more than the blob; it is
    never decompressed beyond that.
    """
    size = _padded(ref.size)
    try:
        # A frame states the length of its content, and zstandard allocates that much.
        if len(base) != ref.size or zstandard.frame_content_size(delta) != size:
            raise DeltaError(f"a delta to a blob of {ref.size} bytes has {size} bytes when it is decompressed")
        planes = zstandard.ZstdDecompressor().decompress(delta, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a damaged delta: {error}") from error
    folded = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(FLOAT_BYTES, -1).T).view("<u4").reshape(-1)
    moved = folded >> 1 ^ -(folded & 1)
    try:
        return ref.check((_words(base) + moved).tobytes()[: ref.size])
    except DigestMismatch as error:
        raise DeltaError(f"a delta that leads elsewhere: {error}") from error


def _words(data: bytes) -> NDArray[np.uint32]:
    """The bytes as little-endian integers, filled up with zeros."""
    return np.frombuffer(data.ljust(_padded(len(data)), b"\0"), "<u4")


def _padded(size: int) -> int:
    return -(-size // FLOAT_BYTES) * FLOAT_BYTES
