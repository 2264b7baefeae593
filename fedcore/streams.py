"""Random streams that depend only on a key: Philox4x64-10 (Salmon et al. 2011), whose output NumPy guarantees.

Spec: docs/spec/plan.md §4. With the same key a device, the coordinator and the simulator draw the same words.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
