"""The examples that a device visits: the shares that are held out, and batches in an order that depends on a key.

Spec: docs/spec/plan.md §4. The order comes from a random stream that is keyed by (task seed, round, slot, pass, epoch).
"""

from __future__ import annotations

import functools
import hashlib
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.errors import PlanError
from fedcore.params import Float32
from fedcore.schedule import Loop
from fedcore.validation import demand

# Hold-outs: shares of a population's devices and of a collection's examples that hashes keep apart from training.
#
# Spec: docs/spec/rounds.md §6, docs/spec/plan.md §1.1. A hash depends on no task, round or seed, and a smaller share is
# always within a larger one.


_DEVICE, _EXAMPLE = b"muster.hold-out.device.v1\0", b"muster.hold-out.example.v1\0"
Side = Literal["train", "held-out"]


def is_held_out(population: str, device: str, share: float) -> bool:
    """Whether the device with this id is in the held-out share, from 0 to below 1, of a population."""
    return _is_below(hashlib.sha256(_DEVICE + population.encode() + b"\0" + device.encode()).digest(), share)


class HoldOut(msgspec.Struct, frozen=True):
    """The share of a collection's examples that is held out, and the side of it that a plan runs on."""

    share: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    side: Side = "train"

    @classmethod
    def asked(cls, share: float, *, on_held_out: bool) -> HoldOut | None:
        """The hold-out that export or a simulation was asked for; None for a share of 0.

        Raises PlanError naming the option that is not what it may be.
        """
        demand(PlanError, 0 <= share < 1, "hold_out_examples", "a number, at least 0 and below 1", share)
        wording = "left out without hold_out_examples: no example is held out"
        demand(PlanError, bool(share) or not on_held_out, "on_held_out_examples", wording, on_held_out)
        return cls(share, "held-out" if on_held_out else "train") if share else None

    def kept(self, collection: str, columns: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
        """Which examples (n,) are on this side. columns: the fields in the plan's order and dtypes, (n, …) each."""
        start = hashlib.sha256(_EXAMPLE + collection.encode() + b"\0")
        held_out = np.zeros(len(columns[0]), bool)
        for index, parts in enumerate(zip(*map(_rows, columns), strict=True)):
            digest = start.copy()
            for part in parts:
                digest.update(part)
            held_out[index] = _is_below(digest.digest(), self.share)
        return held_out if self.side == "held-out" else ~held_out


def _is_below(digest: bytes, share: float) -> bool:
    # A power of two scales a float exactly, and Python compares integers and floats exactly.
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _rows(column: NDArray[Any]) -> list[memoryview]:
    """The little-endian bytes of each example of a column (n, …)."""
    flat = np.ascontiguousarray(column, column.dtype.newbyteorder("<")).reshape(-1)
    data, width = flat.view(np.uint8).data, flat.nbytes // max(len(column), 1)
    return [data[place * width : (place + 1) * width] for place in range(len(column))]


# Batches: the examples that a device visits, in an order that depends only on a key.


# Random streams that depend only on a key: Philox4x64-10 (Salmon et al. 2011), whose output NumPy guarantees.
#
# Spec: docs/spec/plan.md §4. With the same key a device, the coordinator and the simulator draw the same words.

Words = NDArray[np.uint64]


def stream(label: bytes, *numbers: int, words: int) -> Words:
    """The first 64-bit outputs of the stream that a label and numbers from 0 to below 2⁶⁴ name."""
    tag = label + struct.pack(f"<{len(numbers)}Q", *numbers)
    return _GENERATOR.raw(np.frombuffer(hashlib.sha256(tag).digest()[:16], "<u8"), words)


class _Generator(threading.local):
    """One Philox generator per thread: moving it to another stream takes a quarter of the time of making a new one."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        zeros, begin = np.zeros(4, np.uint64), {"buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
        self._counter: dict[str, Words] = {"counter": zeros}
        self._begin: Any = {"bit_generator": "Philox", "state": self._counter, "buffer": zeros, **begin}

    def raw(self, philox_key: Words, words: int) -> Words:
        """The first 64-bit outputs of the stream of a key (2,)."""
        self._counter["key"] = philox_key
        self._philox.state = self._begin
        return self._philox.random_raw(words)


_GENERATOR = _Generator()


SECRET_BYTES = 32


class StreamKey(msgspec.Struct, frozen=True):
    """The key of a device's random streams in one round: it determines every random number of the device.

    secret: in a secure round, bytes that only the device knows; the device's noise depends on them, the order of
    examples does not. Else empty.
    """

    seed: int
    round: int
    slot: int
    secret: bytes = b""


def permutation(key: StreamKey, pass_index: int, epoch: int, examples: int) -> NDArray[np.int64]:
    """A random order of `examples` indices: the stable argsort of that many raw 64-bit outputs."""
    return _stream(b"muster.order.v1", key, pass_index, epoch, examples).argsort(kind="stable")


def noise(key: StreamKey, pass_index: int, step: int, size: int) -> NDArray[np.int32]:
    """Random integers (size,), uniform over all of int32, one for every place of a batch. Dropout draws from them."""
    return (
        _stream(b"muster.noise.v1" + key.secret, key, pass_index, step, -(-size // 2)).astype("<u8").view("<i4")[:size]
    )


def _stream(label: bytes, key: StreamKey, pass_index: int, counter: int, words: int) -> Words:
    """Random words of a device, for a pass of a round."""
    return stream(label, key.seed, key.round, key.slot, pass_index, counter, words=words)


def batches(loop: Loop, examples: int, key: StreamKey, pass_index: int) -> Iterator[tuple[NDArray[np.int64], Float32]]:
    """Yield `(indices (B,), mask (B,))` for every step of a pass.

    B is always `loop.batch_size`: a short last batch is padded with its own first index under mask 0.
    """
    for indices, mask in sweeps(loop, examples, key, pass_index):
        yield from zip(indices, mask, strict=True)


def sweeps(loop: Loop, examples: int, key: StreamKey, pass_index: int) -> Iterator[tuple[NDArray[np.int64], Float32]]:
    """Yield `(indices (S, B), mask (S, B))` for every sweep of a pass: its S batches, as `batches` has them."""
    size, remaining, epoch = loop.batch_size, loop.step_count(examples), 0
    mask = _mask(examples, size)
    steps = len(mask)
    while remaining > 0:
        order = permutation(key, pass_index, epoch, examples) if loop.shuffle else np.arange(examples)
        places = np.empty((steps, size), np.int64)
        flat = places.reshape(-1)
        flat[:examples], flat[examples:] = order, order[(steps - 1) * size]
        yield places[:remaining], mask[:remaining]
        remaining, epoch = remaining - steps, epoch + 1


@functools.lru_cache(maxsize=1024)
def _mask(examples: int, size: int) -> Float32:
    """The read-only mask (S, B) of a sweep."""
    steps = -(-examples // size)
    mask = (np.arange(steps * size) < examples).astype(np.float32).reshape(steps, size)
    mask.flags.writeable = False
    return mask
