"""Merkle trees, and the neighbour graph that their roots decide. Spec: docs/spec/secagg.md §3."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from secagg.keys import tag
from secagg.masking import stream
from secagg.parameters import GraphParameters

EMPTY = bytes(32)


def sha256(data: bytes) -> bytes:
    """H of the specification."""
    return hashlib.sha256(data).digest()


def depth(n: int) -> int:
    """Number of siblings in a path, for n leaves."""
    return (n - 1).bit_length()


class Tree:
    """All levels of the tree over at least one leaf."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._levels = _levels([hash_of(leaf) for leaf in leaves])

    @property
    def root(self) -> bytes:
        """The hash that commits to all leaves and their order."""
        return self._levels[-1][0]

    def path(self, position: int) -> bytes:
        """The siblings from the leaf at `position` upwards, joined."""
        return b"".join(level[position >> height ^ 1] for height, level in enumerate(self._levels[:-1]))


def hash_of(leaf: bytes) -> bytes:
    """The hash of a leaf in the tree."""
    return sha256(b"\0" + leaf)


def root_of(hashes: Sequence[bytes]) -> bytes:
    """The root of the tree over leaves with these hashes, at least one."""
    return _levels(hashes)[-1][0]


def climb(leaf: bytes, position: int, path: bytes) -> bytes:
    """The root that follows from a leaf, its position and its path."""
    node = hash_of(leaf)
    for height in range(len(path) // 32):
        sibling = path[32 * height : 32 * height + 32]
        node = sha256(b"\1" + (sibling + node if position >> height & 1 else node + sibling))
    return node


def _levels(hashes: Sequence[bytes]) -> list[list[bytes]]:
    level = [*hashes, *[EMPTY] * ((1 << depth(len(hashes))) - len(hashes))]
    levels = [level]
    while len(level) > 1:
        level = [sha256(b"\1" + level[i] + level[i + 1]) for i in range(0, len(level), 2)]
        levels.append(level)
    return levels


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
