"""Bytes of what replicas tell drivers: JSON behind its length, then the sums of the shares that have one. Pure.

Spec: docs/spec/rounds.md §5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.errors import MalformedMessage
from fedcore.decoding import UNDECODABLE

T = TypeVar("T", bound=msgspec.Struct)
_HEAD = struct.Struct(">I")


def encode_frame(message: msgspec.Struct, sums: Iterable[NDArray[Any]], kind: np.dtype[Any]) -> bytes:
    """The bytes of a message and of its sums, whose numbers travel as `kind`."""
    head = msgspec.json.encode(message)
    return b"".join([_HEAD.pack(len(head)), head, *(np.ascontiguousarray(one, kind).data for one in sums)])


def decode_frame(
    data: memoryview, head: msgspec.json.Decoder[T], sizes: Callable[[T], Sequence[int]], kind: np.dtype[Any]
) -> tuple[T, list[NDArray[Any] | None]]:
    """A message, and for each of the `sizes` that it has a sum of so many numbers; None for 0. Raises MalformedMessage.

    The sums are views of `data`.
    """
    try:
        (length,) = _HEAD.unpack(data[: _HEAD.size])
        message, rest = head.decode(data[_HEAD.size : _HEAD.size + length]), data[_HEAD.size + length :]
    except (struct.error, *UNDECODABLE) as error:
        raise MalformedMessage(f"these shares are another version's, run one on all replicas: {error}") from error
    if len(rest) != sum(sizes(message)) * kind.itemsize:
        raise MalformedMessage(f"the sums of these shares have {len(rest)} bytes, and not what they announce")
    sums: list[NDArray[Any] | None] = []
    for size in sizes(message):
        sums.append(np.frombuffer(rest, kind, size) if size else None)
        rest = rest[size * kind.itemsize :]
    return message, sums
