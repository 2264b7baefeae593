"""Encodings: message types, fields taken from the front, bitmaps, heads. Spec: docs/spec/secagg.md §1, §4."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from secagg.errors import Malformed, UnsupportedSuite, WrongSession


class MessageType(IntEnum):
    """The number of a message, which is its first byte. Devices send the odd ones, and the server the others."""

    INVITE = 0
    ADVERTISE = 1
    ROSTER = 2
    SHARES = 3
    DELIVER = 4
    COMPLAINTS = 5
    INCLUDED = 6
    MASKED = 7
    SURVIVORS = 8
    CONFIRM = 9
    CONFIRMATIONS = 10
    UNMASK = 11
    RESULT = 12

    @classmethod
    def of(cls, message: bytes) -> MessageType:
        """The type of a message. Raises Malformed when it has none."""
        if not message or message[0] > cls.RESULT:
            raise Malformed(f"a message with head {message[:2].hex() or '(empty)'} does not exist")
        return cls(message[0])


DEVICE_MESSAGES = tuple(number for number in MessageType if number % 2)
"""The messages that devices send."""


VERSION = 1
DIGEST_BYTES = 32


class Reader:
    """A reader that takes fields from the front of a message, and refuses bytes that are missing.

    As a context, it also refuses bytes that are left over at the end of the block.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._data, self._at, self._name = data, 0, name

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        end = self._at + size
        if end > len(self._data):
            raise Malformed(f"{self._name} ends after {len(self._data)} bytes, in a field that goes to {end}")
        part = self._data[self._at : end]
        self._at = end
        return part

    def integer(self, size: int) -> int:
        """The next unsigned integer of that many bytes."""
        return int.from_bytes(self.take(size), "little")

    def bitmap(self, n: int) -> frozenset[int]:
        """The positions whose bits are set."""
        return read_bitmap(self.take(-(-n // 8)), n)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._at != len(self._data):
            raise Malformed(f"{self._name} has {len(self._data) - self._at} bytes too many")


def bitmap(positions: frozenset[int], n: int) -> bytes:
    """A set of positions below n as bits, the least significant first."""
    data = bytearray(-(-n // 8))
    for position in positions:
        data[position // 8] |= 1 << position % 8
    return bytes(data)


def read_bitmap(data: bytes, n: int) -> frozenset[int]:
    """The positions in a bitmap of n bits."""
    if n % 8 and data[-1] >> n % 8:
        raise Malformed(f"a bitmap of {n} positions names others")
    return frozenset(position for position in range(n) if data[position // 8] >> position % 8 & 1)


def open_message(data: bytes, number: MessageType, name: str, session: bytes | None = None) -> Reader:
    """A reader behind the head of message `number`. Raises Malformed, UnsupportedSuite, WrongSession."""
    reader = Reader(data, name)
    actual, version = reader.take(2)
    if actual != number:
        raise Malformed(f"message M{actual} came instead of M{number}, {name}")
    if version != VERSION:
        raise UnsupportedSuite(f"{name} has version {version}; this end speaks {VERSION}: update the older end")
    if session is not None and reader.take(DIGEST_BYTES) != session:
        raise WrongSession(f"{name} belongs to another session: it is late, or the other end holds another roster")
    return reader


def head(number: MessageType, session: bytes = b"") -> bytes:
    """The head that every message begins with."""
    return bytes([number, VERSION]) + session


def ascending(reader: Reader, count: int) -> Iterator[int]:
    """The positions at the start of `count` entries; the caller reads the other fields. Positions must ascend."""
    last = -1
    for _ in range(count):
        position = reader.integer(4)
        if position <= last:
            raise Malformed("positions do not ascend")
        last = position
        yield position
