"""Low-rank factors: a device sends each matrix times a random orthonormal basis. Konečný et al. 2016, §3.

As in PowerSGD (Vogels, Karimireddy, Jaggi 2019), all parties know the basis, which makes the map linear. Unlike there,
each round draws a new basis, so that no device or coordinator has to remember the previous one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedcore.codecs.codec import Codec, CodecKey, Floating, Values
from fedcore.errors import PlanError
from fedcore.params import Size


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
