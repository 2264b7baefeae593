"""Keyed normal numbers: noise from the system's cryptographic generator, which its key makes again.

A stream of ChaCha20 becomes uniform numbers of 53 bits, and pairs of these normal ones by Box and Muller 1958. So no
number of a sum tells anything about another one, and the tail reaches to 8.5 standard deviations.
"""

from __future__ import annotations

import secrets

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

KEY_BYTES = 32
_PAIRS = 1 << 15
"""Pairs that are made at once, in a core's second cache."""
_BITS = 53


class KeyedNormals:
    """Standard normal numbers, one after the other: the same ones for the same key of KEY_BYTES."""

    def __init__(self, key: bytes) -> None:
        self._stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    @classmethod
    def fresh(cls) -> KeyedNormals:
        """Numbers that cannot be made again."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def standard_normal(self, size: int) -> NDArray[np.float64]:
        """The next `size` numbers, float64 (size,). An odd size leaves one unused."""
        normals = np.empty(size + size % 2)
        for begin in range(0, normals.size, 2 * _PAIRS):
            block = normals[begin : begin + 2 * _PAIRS]
            radius, angle = self._uniform(block.size).reshape(2, -1)
            np.log(radius, out=radius)
            radius *= -2
            np.sqrt(radius, out=radius)
            angle *= 2 * np.pi
            np.multiply(radius, np.cos(angle), out=block[: radius.size])
            np.multiply(radius, np.sin(angle), out=block[radius.size :])
        return normals[:size]

    def _uniform(self, size: int) -> NDArray[np.float64]:
        """Multiples of 2^-53, above 0 and up to 1."""
        words = np.frombuffer(self._stream.update(bytes(8 * size)), np.uint64) >> np.uint64(64 - _BITS)
        uniform: NDArray[np.float64] = (words + np.uint64(1)).astype(np.float64)
        uniform *= 2.0**-_BITS
        return uniform
