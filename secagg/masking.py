"""Masks and noise that a device adds to its words. Spec: docs/spec/secagg.md §1, §6, §7.

One key makes one stream, so the counter starts at zero. It can also seek, so any slice can be masked independently.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, log, sqrt
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


# Noise: Skellam-distributed integers that devices add to their quantised values, and bounds on their sizes.
#
# Spec: docs/spec/secagg.md §9. A Skellam variable of variance v is the difference of two Poisson variables of mean v/2.
# Sums of Skellam variables are Skellam, whatever devices drop out: their variances add up. Agarwal, Kairouz, Liu 2021.

MOST_VARIANCE = 1 << 26
"""The largest variance of one device's noise, in squared steps: finer steps would cost bits and gain nothing."""
RARE_BITS = 40
"""Events with probability below 2^-40 are assumed not to happen, as in `secagg.parameters`. Privacy does not depend on
such an assumption."""
_LN2 = log(2)
_TAIL_BITS = 130
"""A table ends where larger numbers have a probability below 2^-130."""
_COARSE, _FINE = 63, 64
"""Bits of the number that is looked up, and further bits, used if it equals a threshold."""
_GUIDE_BITS = 16


def most_square(norm: float, size: int) -> int:
    """The greatest squared L2 norm of a rounded vector (size,), in steps, whose own norm is at most `norm` steps.

    Unbiased rounding exceeds it with probability below 2^-40, and is then repeated. Kairouz, Liu, Steinke 2021, §4.
    """
    root = sqrt(size)
    likely = norm * norm + size / 4 + sqrt(2 * RARE_BITS * _LN2) * (norm + root / 2)
    return floor(min(likely, (norm + root) * (norm + root)))


def rounding_bound(devices: int, size: int) -> float:
    """A bound, in steps, on the L2 norm of the sum of the rounding errors (size,) of `devices` devices.

    Each error is below one step, so √size per device is a certain bound. Errors are also sub-gaussian with variance
    1/4; that bound is exceeded with probability below 2^-40. Hsu, Kakade, Zhang 2012, Proposition 1.1.
    """
    exponent = RARE_BITS * _LN2
    likely = sqrt(devices * (size + 2 * sqrt(size * exponent) + 2 * exponent)) / 2
    return min(likely, devices * sqrt(size))


def noise_share(noise_multiplier: float, square: int, honest: int) -> int:
    """The variance of one device's noise: a whole number of squared steps.

    With it the noise of `honest` devices has a standard deviation of noise_multiplier times the root of `square`.
    """
    return ceil(noise_multiplier * noise_multiplier * square / honest)


def noise_bound(variance: float, size: int) -> int:
    """A bound on the absolute values of Skellam noise (size,); exceeded with probability below 2^-40.

    Skellam variables are sub-gamma: P[X > √(2 v u) + u / 3] ≤ e^-u, since cosh t − 1 ≤ t² / (2 − 2t/3).
    """
    exponent = (RARE_BITS + 1 + size.bit_length()) * _LN2
    return ceil(sqrt(2 * variance * exponent) + exponent / 3) if variance else 0


def norm_bound(variance: float, size: int) -> float:
    """A bound on the L2 norm of Skellam noise (size,); exceeded with probability below 2^-39.

    Bernstein's inequality for the squares, of variance 2v² + v, of numbers that stay within `noise_bound`.
    """
    exponent = RARE_BITS * _LN2
    spread = sqrt(2 * size * (2 * variance * variance + variance) * exponent)
    return sqrt(size * variance + spread + float(noise_bound(variance, size)) ** 2 * exponent / 3)


def draw_noise(variance: int, uniform: Keystream, size: int) -> NDArray[np.int64]:
    """Independent Skellam integers (size,) of this variance; every probability is exact to 2^-120.

    uniform: a stream with a secret key, which holds 8 bytes for each number.
    """
    table = _table(variance)
    words = uniform.u64(size)
    signs = (words & np.uint64(1)).astype(np.int64)
    words = words >> np.uint64(1)
    magnitudes = table.find(words)
    # A number on a threshold (one in 2^63 for each) needs more bits to decide between two values.
    for place in np.flatnonzero((magnitudes > 0) & (table.coarse[magnitudes - 1] == words)):
        more = int(uniform.u64(1)[0])
        magnitudes[place] = bisect_right(table.exact, int(words[place]) << _FINE | more)
    return np.where(signs, -magnitudes, magnitudes)


@dataclass(frozen=True, slots=True)
class _Table:
    """The distribution of |X|. exact: 2^127 · P[|X| ≤ k] for k = 0, 1, …; coarse: the same times 2^-64.

    guide: for every value of a number's first 16 bits, the index of the smallest such number among the thresholds.
    """

    exact: list[int]
    coarse: NDArray[np.uint64]
    guide: NDArray[np.int64]

    def find(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        """For each number of 63 bits, the number of thresholds that are not above it."""
        entries = self.guide[(words >> np.uint64(_COARSE - _GUIDE_BITS)).astype(np.intp)]
        entries += self.coarse[entries] <= words
        rest = np.flatnonzero(self.coarse[entries] <= words)
        entries[rest] = np.searchsorted(self.coarse, words[rest], "right")
        return entries


@lru_cache(maxsize=4)
def _table(variance: int) -> _Table:
    """P[X = k] = e^-v I_k(v): Bessel functions by Miller's recurrence, downwards in integers from where they vanish."""
    if not 1 <= variance <= MOST_VARIANCE:
        raise ValueError(f"a variance of 1 to {MOST_VARIANCE} can be drawn, not {variance}")
    exponent = _TAIL_BITS * _LN2
    last = ceil(sqrt(2 * variance * exponent) + exponent / 3)
    after, here = 0, 1 << 128
    bessel = [here]
    for order in range(last, 0, -1):
        after, here = here, after + 2 * order * here // variance
        bessel.append(here)
    bessel.reverse()
    total = 2 * sum(bessel) - bessel[0]
    below, exact = -bessel[0], []
    for value in bessel:
        below += 2 * value
        exact.append((below << _COARSE + _FINE) // total)
    coarse = np.array([threshold >> _FINE for threshold in exact], np.uint64)
    firsts = np.arange(1 << _GUIDE_BITS, dtype=np.uint64) << np.uint64(_COARSE - _GUIDE_BITS)
    return _Table(exact, coarse, np.searchsorted(coarse, firsts, "right"))
