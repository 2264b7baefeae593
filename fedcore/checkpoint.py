"""Checkpoints: named flat vectors as safetensors bytes, and exact deltas between two versions of one.

Spec: docs/spec/params.md. Nothing here can execute code on load.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from fedcore.errors import DeltaError, DigestMismatch, SchemaError
from fedcore.params import FLOAT_BYTES, Float32, Frozen, FrozenVector, VectorSpec
from fedcore.plan import BlobRef
from fedcore.validation import UNDECODABLE, decoder


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER = decoder(dict[str, _Tensor])
_LENGTH_BYTES = 8
_OF_A_VECTOR = 256
"""Bytes of a header for each vector, at most, beside its name, of which a character may be escaped as six."""
_DTYPES = {"float32": "F32", "uint8": "U8"}


def specs_of(vectors: Mapping[str, Float32]) -> tuple[VectorSpec, ...]:
    """The specs that `vectors` satisfy, in their order."""
    return tuple(VectorSpec(name, int(vector.size)) for name, vector in vectors.items())


def frozen_specs_of(vectors: Mapping[str, Frozen]) -> tuple[FrozenVector, ...]:
    """The specs that vectors which no round changes satisfy, in their order."""
    return tuple(
        FrozenVector(name, int(vector.size), "uint8" if vector.dtype == np.uint8 else "float32")
        for name, vector in vectors.items()
    )


def encode(vectors: Mapping[str, Float32]) -> bytes:
    """Safetensors bytes of float32 vectors; equal vectors give equal bytes.

    Raises SchemaError when a value is not a one-dimensional float32 array.
    """
    return _encode(vectors, "float32")


def encode_frozen(vectors: Mapping[str, Frozen]) -> bytes:
    """The same of vectors that no round changes: float32 or uint8."""
    return _encode(vectors, "float32", "uint8")


def _encode(vectors: Mapping[str, Frozen], *dtypes: str) -> bytes:
    for name, vector in vectors.items():
        if vector.dtype.name not in dtypes or vector.ndim != 1:
            raise SchemaError(f"vector {name!r} is {vector.dtype}{list(vector.shape)}, expected {dtypes[0]} (n,)")
    return safetensors.numpy.save({name: np.ascontiguousarray(vector) for name, vector in vectors.items()})


def digest(vector: Float32) -> str:
    """SHA-256 of a vector's values in hex, as a release and the entries of its lineage name a vector."""
    return hashlib.sha256(vector.astype("<f4", copy=False).tobytes()).hexdigest()


def view(data: memoryview, spec: VectorSpec) -> Float32:
    """The only vector in `data`, as `decode` gives it. It is a view, not a copy, if `encode` made the bytes."""
    if is_plain(data, spec):
        return np.frombuffer(data, np.float32, offset=values_at(spec))
    return decode(bytes(data), (spec,))[spec.name]


def is_plain(data: memoryview, spec: VectorSpec) -> bool:
    """Whether the bytes around the values in `data` are as `encode` makes them."""
    head = _head(spec)
    return data[: len(head)] == head and len(data) == len(head) + FLOAT_BYTES * spec.size


def values_at(spec: VectorSpec) -> int:
    """The offset of the values of one vector in the bytes that `encode` makes."""
    return len(_head(spec))


@lru_cache(maxsize=64)
def _head(spec: VectorSpec) -> bytes:
    """The bytes before the values when one vector is encoded."""
    return encode({spec.name: np.zeros(spec.size, np.float32)})[: -FLOAT_BYTES * spec.size or None]


def decode(data: bytes, specs: Sequence[VectorSpec]) -> dict[str, Float32]:
    """The vectors in `data`, in the order of `specs`.

    Raises SchemaError when the bytes are not safetensors, or do not hold exactly the vectors of `specs`.
    """
    return _decode(data, {spec.name: ("float32", spec.size) for spec in specs})


def decode_frozen(data: bytes, specs: Sequence[FrozenVector]) -> dict[str, Frozen]:
    """The same of vectors that no round changes."""
    return _decode(data, {spec.name: (spec.dtype, spec.size) for spec in specs})


def map_frozen(file: Path | int, specs: Sequence[FrozenVector]) -> dict[str, Frozen]:
    """The same of a file, by its path or by a descriptor of it: views of the file, which nobody can write to.

    A byte of them is read when it is used, and the system may forget it again. Raises OSError too.
    """
    with open(file, "rb", closefd=not isinstance(file, int)) as opened:
        try:
            data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
            most = sum(_OF_A_VECTOR + 6 * len(spec.name) for spec in specs)
            if start > most:
                raise SchemaError(f"the header has {start} bytes, where {len(specs)} vectors need {most} at most")
            tensors = _HEADER.decode(data[_LENGTH_BYTES:start])
        except (*UNDECODABLE, ValueError) as error:  # ValueError: an empty file
            raise SchemaError(f"not a safetensors file: {error}") from error
    if set(tensors) != {spec.name for spec in specs}:
        raise SchemaError(f"vectors are {sorted(tensors)}, expected {sorted(spec.name for spec in specs)}")
    return {spec.name: _view(data[start:], tensors[spec.name], spec) for spec in specs}


def _view(values: memoryview, tensor: _Tensor, spec: FrozenVector) -> Frozen:
    first, end = tensor.data_offsets
    vector: Frozen = np.zeros(0, spec.dtype)
    if 0 <= first <= end <= len(values) and (end - first) % vector.itemsize == 0:
        vector = np.frombuffer(values[first:end], spec.dtype)
    found = tensor.dtype, tensor.shape, vector.size, vector.flags.aligned
    if found != (_DTYPES[spec.dtype], (spec.size,), spec.size, True):
        raise SchemaError(
            f"vector {spec.name!r} is {tensor.dtype}{list(tensor.shape)}, expected {spec.dtype}[{spec.size}]"
        )
    return vector


def _decode(data: bytes, expected: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    try:
        vectors = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise SchemaError(f"not a safetensors file: {error}") from error
    if set(vectors) != set(expected):
        raise SchemaError(f"vectors are {sorted(vectors)}, expected {sorted(expected)}")
    for name, (dtype, size) in expected.items():
        vector = vectors[name]
        if vector.dtype != dtype or vector.shape != (size,):
            raise SchemaError(f"vector {name!r} is {vector.dtype}{list(vector.shape)}, expected {dtype}[{size}]")
    return {name: vectors[name] for name in expected}


# Deltas between versions of a blob of float32 values, such as the checkpoints of two rounds: smaller, and exact.
#
# Spec: docs/spec/params.md §4. Values change little from round to round, so the upper bytes of the difference of their
# bit patterns are mostly zero. A delta puts these bytes side by side, and zstandard compresses them away.


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
    import zstandard

    return zstandard.ZstdCompressor().compress(planes.reshape(-1).data)


def applied(delta: bytes, base: bytes, ref: BlobRef) -> bytes:
    """The blob that `ref` names, made from another one and the delta between them.

    Raises DeltaError when the delta is damaged, is for other blobs, or would decompress to more than the blob; it is
    never decompressed beyond that.
    """
    import zstandard

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
