"""Merkle trees: a root that commits to a list, and paths that prove a place in it. Spec: docs/spec/secagg.md §3."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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
