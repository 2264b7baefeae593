"""Batches: which examples a device visits, and in which order, the same on a phone and in the simulator.

Spec: docs/spec/plan.md §4. The order comes from a counter-based generator (Philox4x64-10, Salmon et al. 2011) keyed by
(task seed, round, slot, pass, epoch), of which NumPy guarantees the raw stream.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.loop import Loop
from fedcore.params import Float32

SECRET_BYTES = 32


class StreamKey(msgspec.Struct, frozen=True):
    """The key of a device's random streams in one round: every random number that it draws depends on it.

    secret: in a secure round, bytes that only the device knows, on which its noise depends too; else empty. The order
    of examples does not depend on it.
    """

    seed: int
    round: int
    slot: int
    secret: bytes = b""


def permutation(key: StreamKey, pass_index: int, epoch: int, examples: int) -> NDArray[np.int64]:
    """A random order of `examples` indices: the stable argsort of that many raw 64-bit outputs."""
    return np.argsort(_stream(b"muster.order.v1", key, pass_index, epoch, examples), kind="stable")


def noise(key: StreamKey, pass_index: int, step: int, size: int) -> NDArray[np.int32]:
    """Random integers (size,), uniform over all of int32, one for every place of a batch: what dropout draws from."""
    return (
        _stream(b"muster.noise.v1" + key.secret, key, pass_index, step, -(-size // 2)).astype("<u8").view("<i4")[:size]
    )


def _stream(label: bytes, key: StreamKey, pass_index: int, counter: int, words: int) -> NDArray[np.uint64]:
    """Raw 64-bit outputs of Philox, of the stream that a label, a device's key, a pass and a counter name."""
    tag = struct.pack("<QQQQQ", key.seed, key.round, key.slot, pass_index, counter)
    philox_key = np.frombuffer(hashlib.sha256(label + tag).digest()[:16], "<u8")
    return np.random.Philox(key=philox_key).random_raw(words)


def batches(loop: Loop, examples: int, key: StreamKey, pass_index: int) -> Iterator[tuple[NDArray[np.int64], Float32]]:
    """Yield `(indices (B,), mask (B,))` for every step of a pass.

    B is always `loop.batch_size`: a short last batch is padded with its own first index under mask 0.
    """
    remaining = loop.step_count(examples)
    for epoch in range(loop.epochs):
        order = permutation(key, pass_index, epoch, examples) if loop.shuffle else np.arange(examples)
        for start in range(0, examples, loop.batch_size):
            if remaining == 0:
                return
            remaining -= 1
            real = order[start : start + loop.batch_size]
            indices = np.full(loop.batch_size, real[0], np.int64)
            indices[: real.size] = real
            mask = np.zeros(loop.batch_size, np.float32)
            mask[: real.size] = 1
            yield indices, mask
