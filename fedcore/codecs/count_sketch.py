"""Count sketch: every value is added to one counter of each row, under a random sign. Charikar et al. 2002.

For reports: Rothchild et al., "FetchSGD", ICML 2020. Errors are smallest where a few values are much larger than all
others. The places of these values may differ between rounds and between devices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcore.codecs.codec import Codec, CodecKey, Floating, Values
from fedcore.errors import PlanError
from fedcore.params import Size

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
