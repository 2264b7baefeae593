"""The neighbour graph: a Harary ring on a permutation that no party can choose. Spec: docs/spec/secagg.md §3."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from secagg.keys import tag
from secagg.masking import stream
from secagg.merkle import sha256
from secagg.parameters import GraphParameters


class NeighbourGraph:
    """The neighbours of every position, by rank: the order in which they follow on the ring."""

    def __init__(self, parameters: GraphParameters, root: bytes, beacon: bytes) -> None:
        self._parameters = parameters
        words = stream(sha256(tag("graph") + root + beacon), parameters.n)
        self._ring: NDArray[np.int64] = np.argsort(words, kind="stable")
        self._place = np.empty_like(self._ring)
        self._place[self._ring] = np.arange(parameters.n)

    def neighbours(self, position: int) -> list[int]:
        """The k neighbours of a position; the one at index x − 1 has rank x. The relation is symmetric."""
        n, k = self._parameters.n, self._parameters.k
        if self._parameters.complete:
            distances = np.arange(1, n)
        else:
            distances = np.concatenate([np.arange(1, k // 2 + 1), np.arange(n - k // 2, n)])
        positions: list[int] = self._ring[(self._place[position] + distances) % n].tolist()
        return positions
