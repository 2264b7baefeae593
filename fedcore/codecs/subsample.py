"""Subsampling: all devices of a round send the same randomly drawn values. Konečný et al. 2016, §3 (random mask)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcore.codecs.codec import Codec, CodecKey, Floating, Values
from fedcore.errors import PlanError
from fedcore.params import Size


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
