"""Codecs: linear maps that make a segment smaller, and how reports travel through them. They commute with sums.

Spec: docs/spec/plan.md §5.1. A segment names its codecs in the order in which a device applies them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod, sqrt
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.batching import Words, stream
from fedcore.errors import PlanError
from fedcore.params import Size

# Codecs: linear maps that make a segment smaller: rotation, subsampling, low-rank factors, count sketch.
#
# Spec: docs/spec/plan.md §5.1. A device encodes its values before they are weighed; the coordinator decodes their sum.
#
# Legend: V values of a segment as the report graph makes them, C values that travel.


Floating = TypeVar("Floating", np.float32, np.float64)
Values: TypeAlias = NDArray[Floating]

_LABEL = b"muster.codec.v1"


class RoundKey(msgspec.Struct, frozen=True):
    """The public key of a round's codecs, the same for all its devices: the task's seed and the round's number."""

    seed: int
    round: int


class CodecKey(msgspec.Struct, frozen=True):
    """The key of one codec in one round: its segment's index in the layout, and its own index in the segment."""

    round: RoundKey
    segment: int
    place: int

    def words(self, count: int) -> Words:
        """The first 64-bit words of the codec's random stream."""
        return stream(_LABEL, self.round.seed, self.round.round, self.segment, self.place, words=count)

    def signs(self, count: int) -> NDArray[np.int8]:
        """Random signs (count,), +1 where a bit is 0 and −1 where it is 1; bits come lowest first out of each word."""
        bits = np.unpackbits(self.words(-(-count // 64)).astype("<u8").view(np.uint8), count=count, bitorder="little")
        return 1 - 2 * bits.view(np.int8)


class Codec(msgspec.Struct, frozen=True, tag_field="codec"):
    """A linear map from V values to C, which depends on nothing but its settings and a public key.

    Both ways keep the values' precision, float32 or float64. Where C < V, decode∘encode is unbiased: over random keys,
    its mean is the identity.
    """

    def coded_size(self, size: int) -> int:
        """C of a segment with V = `size`. Raises PlanError when such a segment cannot be encoded."""
        raise NotImplementedError

    def growth(self, size: int) -> float:
        """The mean factor by which decoding raises the squared L2 norm of V = `size` values.

        If some values grow more than others, the factor is that of the values that grow most.
        """
        return size / max(1, self.coded_size(size))

    def encode(self, values_V: Values[Floating], key: CodecKey) -> Values[Floating]:
        """The values that a device sends instead of its own: float (C,)."""
        raise NotImplementedError

    def decode(self, coded_C: Values[Floating], size: int, key: CodecKey) -> Values[Floating]:
        """The estimate of a sum of values, float (V,) with V = `size`, from the sum of the coded values."""
        raise NotImplementedError


# Count sketch: every value is added to one counter of each row, under a random sign. Charikar et al. 2002.
#
# For reports: Rothchild et al., "FetchSGD", ICML 2020. Errors are smallest where a few values are much larger than all
# others. The places of these values may differ between rounds and between devices.

MOST_ROWS = 16
"""Every row takes memory for each value, on a device and for each report that is decoded."""


class CountSketch(Codec, frozen=True, tag="count_sketch"):
    """`rows` × `columns` counters travel, and a value is estimated by the median of its counters, one in each row.

    The error of each is symmetric about 0, so the median is unbiased, too. More rows make large errors rarer.

    Trap: values that fall on one counter may add up, so the L2 norm of counters may be above that of the values.
    """

    rows: Size
    columns: Size

    def coded_size(self, size: int) -> int:
        """Raises PlanError unless there is a counter, at most as many as values, and MOST_ROWS rows or fewer."""
        if self.rows > MOST_ROWS:
            raise PlanError(f"a sketch of {self.rows} rows; there may be {MOST_ROWS}")
        counters = self.rows * self.columns
        if not min(1, size) <= counters <= size:
            raise PlanError(
                f"a sketch of {self.rows} × {self.columns} counters; a segment of {size} values has at least 1 and at "
                f"most {size}"
            )
        return counters

    def growth(self, size: int) -> float:
        """The growth of a mean over rows, or of a median, whose variance is up to π/2 times as large."""
        return np.pi / 2 * super().growth(size)

    def encode(self, values_V: Values[Floating], key: CodecKey) -> Values[Floating]:
        """The counters, row by row."""
        counters = [
            np.bincount(columns_V, signs_V * values_V, self.columns)
            for columns_V, signs_V in self._hashes(values_V.size, key)
        ]
        return np.concatenate(counters).astype(values_V.dtype)

    def decode(self, coded_C: Values[Floating], size: int, key: CodecKey) -> Values[Floating]:
        """The estimates."""
        counters = coded_C.reshape(self.rows, self.columns)
        estimates = [
            signs_V * row[columns_V]
            for row, (columns_V, signs_V) in zip(counters, self._hashes(size, key), strict=True)
        ]
        return np.asarray(np.median(estimates, axis=0), coded_C.dtype)

    def _hashes(self, size: int, key: CodecKey) -> list[tuple[NDArray[np.intp], NDArray[np.int8]]]:
        """The column and the sign of every value, (size,) both, for each row."""
        words = key.words(self.rows * size).reshape(self.rows, size)
        signs = 1 - 2 * (words & np.uint64(1)).astype(np.int8)
        columns = ((words >> np.uint64(1)) % np.uint64(max(self.columns, 1))).astype(np.intp)
        return list(zip(columns, signs, strict=True))


# Low-rank factors: a device sends each matrix times a random orthonormal basis. Konečný et al. 2016, §3.
#
# As in PowerSGD (Vogels, Karimireddy, Jaggi 2019), all parties know the basis, which makes the map linear. Unlike
# there, each round draws a new basis, so that no device or coordinator has to remember the previous one.


class LowRank(Codec, frozen=True, tag="low_rank"):
    """`rank` numbers travel of each row of a matrix, or of each column where columns are longer than rows.

    matrices: the rows and columns of the matrices that make up the segment, row-major each. One with a side of at most
    `rank` travels whole; a vector is a matrix of one column.

    The estimate is M Q Qᵀ times n / rank, with an (n, rank) basis Q along the longer side. It is unbiased, as the
    entries of Q are exchangeable and symmetric. L2 norms never grow on the way to the coordinator.
    """

    rank: Size
    matrices: tuple[tuple[Size, Size], ...]

    def coded_size(self, size: int) -> int:
        """Raises PlanError unless the rank is 1 or more and the matrices have as many values as the segment."""
        in_matrices = sum(rows * columns for rows, columns in self.matrices)
        if self.rank < 1 or in_matrices != size:
            raise PlanError(
                f"factors of rank {self.rank} of matrices with {in_matrices} values: the rank is 1 or more, and "
                f"the segment has {size} values"
            )
        return sum(self._sent(shape) for shape in self.matrices)

    def growth(self, size: int) -> float:
        """The growth of the matrix that is compressed most."""
        return max((max(shape) / self.rank for shape in self.matrices if min(shape) > self.rank), default=1.0)

    def encode(self, values_V: Values[Floating], key: CodecKey) -> Values[Floating]:
        """The products, matrix by matrix."""
        parts, begin = [values_V[:0]], 0
        for (rows, columns), basis in zip(self.matrices, self._bases(key, values_V.dtype), strict=True):
            part = values_V[begin : begin + rows * columns]
            begin += part.size
            if basis is not None:
                matrix = part.reshape(rows, columns)
                part = (matrix @ basis if columns >= rows else basis.T @ matrix).ravel()
            parts.append(part)
        return np.concatenate(parts)

    def decode(self, coded_C: Values[Floating], size: int, key: CodecKey) -> Values[Floating]:
        """The estimates, matrix by matrix."""
        parts, begin = [coded_C[:0]], 0
        for shape, basis in zip(self.matrices, self._bases(key, coded_C.dtype), strict=True):
            part = coded_C[begin : begin + self._sent(shape)]
            begin += part.size
            if basis is not None:
                rows, columns = shape
                matrix = part.reshape(rows, -1) @ basis.T if columns >= rows else basis @ part.reshape(-1, columns)
                part = matrix.ravel() * coded_C.dtype.type(max(shape) / self.rank)
            parts.append(part)
        return np.concatenate(parts)

    def _sent(self, shape: tuple[int, int]) -> int:
        """The number of values sent for a matrix."""
        return self.rank * min(shape) if min(shape) > self.rank else shape[0] * shape[1]

    def _bases(self, key: CodecKey, dtype: np.dtype[Floating]) -> Iterator[Values[Floating] | None]:
        """An orthonormal basis (n, rank) along the longer side of each matrix; None where it travels whole.

        Gram–Schmidt of uniform numbers, with the signs that make the factorisation unique: so both ends have the same
        basis up to rounding.
        """
        sides = [max(shape) if min(shape) > self.rank else 0 for shape in self.matrices]
        words, begin = key.words(self.rank * sum(sides)), 0
        for side in sides:
            count = self.rank * side
            uniform = words[begin : begin + count].view(np.int64).reshape(side, self.rank) / 2.0**63
            begin += count
            basis, triangle = np.linalg.qr(uniform)
            yield (basis * np.sign(triangle.diagonal())).astype(dtype) if side else None


# Rotation by a randomised Hadamard transform: it spreads every value over many, so that each needs few bits.
#
# Ailon & Chazelle 2009; Suresh, Yu, Kumar, McMahan 2017, §4. Block by block, x ← H s∘x / √B, with random signs s.

MOST_BLOCK = 1 << 20


class Rotation(Codec, frozen=True, tag="rotation"):
    """An orthogonal map: it keeps the number of values, every inner product and every L2 norm.

    block: B, a power of two. Blocks are rotated in order. There is no padding: the last block ends where the segment
    ends, so it may overlap the one before.
    """

    block: Size

    @classmethod
    def of(cls, size: int) -> Rotation:
        """The rotation of a segment with as many values as possible in one block, up to 2²⁰."""
        return cls(1 << min(max(size, 1), MOST_BLOCK).bit_length() - 1)

    def coded_size(self, size: int) -> int:
        """Raises PlanError unless the block is a power of two and no longer than the segment."""
        power_of_two = self.block > 0 and self.block & self.block - 1 == 0
        if not power_of_two or self.block > max(size, 1):
            raise PlanError(f"a rotation in blocks of {self.block}; {size} values need a power of two up to {size}")
        return size

    def encode(self, values_V: Values[Floating], key: CodecKey) -> Values[Floating]:
        """Rotate every block."""
        rotated_V = values_V.copy()
        signs = self._signs(values_V.size, key)
        for begin, signs_B in zip(self._begins(values_V.size), signs, strict=True):
            block = rotated_V[begin : begin + self.block]
            block *= signs_B
            _transform(block)
        return rotated_V

    def decode(self, coded_C: Values[Floating], size: int, key: CodecKey) -> Values[Floating]:
        """Rotate back, the last block first."""
        values_V = coded_C.copy()
        signs = self._signs(size, key)
        for begin, signs_B in zip(reversed(self._begins(size)), signs[::-1], strict=True):
            block = values_V[begin : begin + self.block]
            _transform(block)
            block *= signs_B
        return values_V

    def _begins(self, size: int) -> list[int]:
        whole = range(0, size - self.block + 1, self.block)
        return [*whole, size - self.block] if size % self.block else [*whole]

    def _signs(self, size: int, key: CodecKey) -> Values[np.float32]:
        blocks = -(-size // self.block)
        return key.signs(blocks * self.block).astype(np.float32).reshape(blocks, self.block)


def _transform(block_B: Values[Floating]) -> None:
    """The Walsh–Hadamard transform of a block in place, divided by √B: its own inverse.

    Sums and differences at distances 1, 2, 4, … B/2, each rounded once: so every language gives the same bits.
    """
    half = 1
    while half < block_B.size:
        pairs = block_B.reshape(-1, 2, half)
        left, right = pairs[:, 0], pairs[:, 1]
        total = left + right
        np.subtract(left, right, out=right)
        left[:] = total
        half *= 2
    block_B *= block_B.dtype.type(block_B.size**-0.5)


class Subsample(Codec, frozen=True, tag="subsample"):
    """A device sends one value of each of `kept` strata: runs of neighbouring values of equal length, or one longer.

    A value that was sent is multiplied by the size of its stratum, which makes the estimate unbiased. All others are 0:
    after a rotation no value has a larger error than others. L2 norms never grow on the way to the coordinator.
    """

    kept: Size

    def coded_size(self, size: int) -> int:
        """Raises PlanError unless `kept` is between 1 and `size`."""
        if not min(1, size) <= self.kept <= size:
            raise PlanError(f"a subsample of {self.kept} values; a segment of {size} has at least 1 and at most {size}")
        return self.kept

    def encode(self, values_V: Values[Floating], key: CodecKey) -> Values[Floating]:
        """The values that were drawn."""
        places, _ = self._drawn(values_V.size, key)
        return values_V[places]

    def decode(self, coded_C: Values[Floating], size: int, key: CodecKey) -> Values[Floating]:
        """The drawn values, and zeros elsewhere."""
        places, widths = self._drawn(size, key)
        values_V = np.zeros(size, coded_C.dtype)
        values_V[places] = coded_C * widths.astype(coded_C.dtype)
        return values_V

    def _drawn(self, size: int, key: CodecKey) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The index that each stratum sends, and the stratum's width: (kept,) both."""
        strata = np.arange(self.kept)
        width, longer = divmod(size, max(self.kept, 1))
        widths = width + (strata < longer)
        # A remainder of 64 bits is biased by less than width / 2⁶⁴.
        within = (key.words(self.kept) % widths.astype(np.uint64)).astype(np.intp)
        return strata * width + np.minimum(strata, longer) + within, widths


# Codecs: linear maps between a report as a graph makes it and as it travels. They commute with sums.


AnyCodec: TypeAlias = Rotation | Subsample | CountSketch | LowRank
"""A codec as a plan has it: its member `codec` says which."""
MOST_CODECS = 8
"""The most codecs of a segment: each goes over all of its values, on every device and in the coordinator's driver."""


def coded_sizes(codecs: Sequence[AnyCodec], size: int) -> list[int]:
    """The number of values before, between and after the codecs. Raises PlanError when a codec does not fit."""
    sizes = [size]
    for codec in codecs:
        sizes.append(codec.coded_size(sizes[-1]))
    return sizes


def encode(codecs: Sequence[AnyCodec], values_V: Values[Floating], key: RoundKey, segment: int) -> Values[Floating]:
    """The values (C,) that travel. segment: the index of the values' segment in its layout."""
    for place, codec in enumerate(codecs):
        values_V = codec.encode(values_V, CodecKey(key, segment, place))
    return values_V


def decode(
    codecs: Sequence[AnyCodec], coded_C: Values[Floating], size: int, key: RoundKey, segment: int
) -> Values[Floating]:
    """Undo the codecs of a sum, the last one first: values (V,) with V = `size`."""
    return _undone(codecs, 0, coded_C, size, key, segment)


def keep_norms(codecs: Sequence[AnyCodec]) -> bool:
    """Whether what travels has the L2 norm of what it is decoded to."""
    return all(isinstance(codec, Rotation) for codec in codecs)


def stretch(codecs: Sequence[AnyCodec]) -> float:
    """The mean factor by which encoding lengthens values; 1 if it never does."""
    return prod(sqrt(codec.rows) for codec in codecs if isinstance(codec, CountSketch))


def growth(codecs: Sequence[AnyCodec], size: int) -> float:
    """The factor by which decoding raises the squared L2 norm of values: `Codec.growth` of all codecs."""
    return prod(codec.growth(before) for codec, before in zip(codecs, coded_sizes(codecs, size), strict=False))


def decoded_norm(
    codecs: Sequence[AnyCodec], coded_C: NDArray[np.float64], size: int, key: RoundKey, segment: int
) -> float:
    """The L2 norm of what `decode` gives."""
    # Leading rotations keep the norm.
    first = next((place for place, codec in enumerate(codecs) if not keep_norms([codec])), len(codecs))
    return float(np.linalg.norm(_undone(codecs, first, coded_C, size, key, segment)))


def _undone(
    codecs: Sequence[AnyCodec], first: int, coded_C: Values[Floating], size: int, key: RoundKey, segment: int
) -> Values[Floating]:
    """Undo the codecs from `first` on, the last one first."""
    sizes = coded_sizes(codecs, size)
    for place in reversed(range(first, len(codecs))):
        coded_C = codecs[place].decode(coded_C, sizes[place], CodecKey(key, segment, place))
    return coded_C
