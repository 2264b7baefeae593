"""Masks: AES-256-CTR keystreams that are added to words. Spec: docs/spec/secagg.md §1, §6, §7.

One key makes one stream, so the counter starts at zero. It can also seek, so any slice can be masked independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

Words = NDArray[np.uint64]

CHUNK_WORDS = 1 << 14  # 128 KB: a chunk, its keystream and the zeros stay in a core's second cache
BLOCK_WORDS = 2
BATCH = 64  # ciphers that are open at once
LITTLE = np.dtype("<u8")


class Mask(NamedTuple):
    """A stream by its key (32 bytes), and its sign: +1 or −1."""

    key: bytes
    sign: int


class Keystream:
    """A stream read from front to end in pieces, without a new array for each."""

    def __init__(self, key: bytes, longest: int) -> None:
        """`longest` is the greatest number of bytes requested at once."""
        self._cipher = _open(key, 0)
        self._zeros, self._buffer = bytes(longest), bytearray(longest)

    def u32(self, size: int) -> NDArray[np.uint32]:
        """The next numbers, uniform over 32 bits, until the next call."""
        self._advance(4 * size)
        return np.frombuffer(self._buffer, "<u4", size)

    def u64(self, size: int) -> Words:
        """The next numbers, uniform over 64 bits, until the next call."""
        self._advance(8 * size)
        return np.frombuffer(self._buffer, LITTLE, size)

    def _advance(self, size: int) -> None:
        self._cipher.update_into(memoryview(self._zeros)[:size], self._buffer)


def stream(key: bytes, size: int) -> Words:
    """The first `size` words of a stream."""
    words = np.zeros(size, np.uint64)
    add_masks(words, [Mask(key, 1)])
    return words


def add_masks(words: Words, masks: Sequence[Mask], start: int = 0) -> None:
    """Add streams, each with its sign, to words in place, modulo 2^64.

    `words` (W,) is contiguous and its first is word `start` of the whole vector; `start` must be even, as a block of
    the cipher is two words.
    """
    if start % BLOCK_WORDS:
        raise ValueError(f"a slice must start at an even word, not {start}")
    zeros = bytes(8 * min(CHUNK_WORDS, words.size))
    buffer = bytearray(len(zeros))
    keystream = np.frombuffer(buffer, LITTLE)
    for first in range(0, len(masks), BATCH):
        batch = [
            (_open(mask.key, start), np.add if mask.sign > 0 else np.subtract) for mask in masks[first : first + BATCH]
        ]
        # Every stream over one chunk before the next chunk: the words are loaded once per batch.
        for begin in range(0, words.size, CHUNK_WORDS):
            chunk = words[begin : begin + CHUNK_WORDS]
            data, stream = (
                (zeros, keystream) if chunk.nbytes == len(zeros) else (zeros[: chunk.nbytes], keystream[: chunk.size])
            )
            for cipher, apply in batch:
                cipher.update_into(data, buffer)
                apply(chunk, stream, out=chunk)


def add_masks_with(executor: Executor, parts: int, words: Words, masks: Sequence[Mask]) -> None:
    """Add masks with an executor's workers, each on a slice of the words; the bits do not depend on the slices."""
    step = -(-words.size // max(parts, 1))
    step += step % BLOCK_WORDS
    starts = range(0, words.size, max(step, BLOCK_WORDS))
    slices = [words[start : start + step] for start in starts]
    for start, done in zip(starts, executor.map(_masked, slices, [masks] * len(slices), starts), strict=True):
        words[start : start + step] = done


def _masked(words: Words, masks: Sequence[Mask], start: int) -> Words:
    words = words.copy()  # what another process sends may be read-only
    add_masks(words, masks, start)
    return words


def _open(key: bytes, start: int) -> CipherContext:
    return Cipher(AES256(key), CTR((start // BLOCK_WORDS).to_bytes(16, "big"))).encryptor()
