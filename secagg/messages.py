"""Every message of the protocol and its one encoding. Spec: docs/spec/secagg.md §4.

`encode` gives the bytes; `decode` refuses, with Malformed, all that `encode` would not give. Values are checked by
whoever receives a message: here only its form.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

from secagg.encoding import DIGEST, Reader, ascending, bitmap, head, open_message
from secagg.errors import Malformed, UnsupportedSuite
from secagg.keys import u32
from secagg.merkle import depth, sha256
from secagg.packing import Segment

SUITE = 1
HONEST, ACTIVE = 0, 1
KEY, SIGNATURE = 32, 64
SHARE, BOX = 32, 80
UNSIGNED = bytes(SIGNATURE)
SEED_SHARE, KEY_SHARE = 0, 1
DONE, ABORTED = 0, 1
SEGMENT = struct.Struct("<IBBBddd")
OFFER = struct.Struct("<BB32sQQIII32s32sH")


@dataclass(frozen=True, slots=True)
class Invite:
    """M0. What is summed, among how many, for which round. `deadline` is in Unix seconds and up to the host."""

    mode: int
    task: bytes
    round: int
    deadline: int
    n_max: int
    min_sum: int
    w_max: int
    layout_hash: bytes
    model_hash: bytes
    segments: tuple[Segment, ...]

    NUMBER: ClassVar = 0

    @property
    def dimension(self) -> int:
        """D, the length of the vector."""
        return sum(segment.size for segment in self.segments)

    def body(self) -> bytes:
        """The message without its signature."""
        offer = OFFER.pack(
            SUITE, self.mode, self.task, self.round, self.deadline, self.n_max, self.min_sum, self.w_max,
            self.layout_hash, self.model_hash, len(self.segments),
        )  # fmt: skip
        return head(self.NUMBER) + offer + b"".join(_pack(segment) for segment in self.segments)

    @property
    def hash(self) -> bytes:
        """invite_hash: what M1 and sid are bound to."""
        return sha256(self.body())

    @classmethod
    def decode(cls, data: bytes) -> tuple[Invite, bytes]:
        """The invitation and its signature."""
        reader = open_message(data, cls.NUMBER, "the invitation")
        (
            suite, mode, task, number, deadline, n_max, min_sum, w_max, layout_hash, model_hash, count,
        ) = OFFER.unpack(reader.take(OFFER.size))  # fmt: skip
        if suite != SUITE:
            raise UnsupportedSuite(f"the invitation asks for suite {suite}; this end knows {SUITE}: update it")
        if mode not in {HONEST, ACTIVE}:
            raise Malformed(f"mode {mode} does not exist")
        if w_max == 0:
            raise Malformed("a greatest weight of 0 has no meaning")
        segments = tuple(_unpack(reader.take(SEGMENT.size)) for _ in range(count))
        signature = reader.take(SIGNATURE)
        reader.close()
        invite = cls(
            mode, task, number, deadline, n_max, min_sum, w_max, layout_hash, model_hash, segments
        )  # fmt: skip
        return invite, signature


def _pack(segment: Segment) -> bytes:
    return SEGMENT.pack(
        segment.size, segment.field_bits, segment.in_bits, segment.weighted, segment.low, segment.high, segment.norm
    )


def _unpack(data: bytes) -> Segment:
    size, field_bits, in_bits, weighted, low, high, norm = SEGMENT.unpack(data)
    if weighted > 1 or field_bits == 0 or not all(isfinite(value) for value in (low, high, norm)):
        raise Malformed("a segment has a flag, a width or a range that does not exist")
    return Segment(size, field_bits, in_bits, low, high, norm, bool(weighted))


@dataclass(frozen=True, slots=True)
class Advertise:
    """M1. A device's id and its keys for this session, signed."""

    id: bytes
    mask_key: bytes
    box_key: bytes
    signature: bytes
    credential: bytes

    NUMBER: ClassVar = 1
    SIZE: ClassVar = 3 * KEY + 2 * SIGNATURE

    @property
    def leaf(self) -> bytes:
        """What the roster holds of the device."""
        return self.id + self.mask_key + self.box_key

    def fields(self) -> bytes:
        """The message without its head, as M2 repeats it."""
        return self.leaf + self.signature + self.credential

    def encode(self, invite_hash: bytes) -> bytes:
        """The message."""
        return head(self.NUMBER, invite_hash) + self.fields()

    @classmethod
    def decode(cls, data: bytes, invite_hash: bytes) -> Advertise:
        """The inverse of `encode`."""
        reader = open_message(data, cls.NUMBER, "the advertisement", invite_hash)
        found = cls.read(reader)
        reader.close()
        return found

    @classmethod
    def read(cls, reader: Reader) -> Advertise:
        """The fields, from the middle of a message."""
        return cls(*(reader.take(size) for size in (KEY, KEY, KEY, SIGNATURE, SIGNATURE)))


@dataclass(frozen=True, slots=True)
class Entry:
    """A neighbour in M2: its position, what it advertised, and the path of its leaf."""

    position: int
    device: Advertise
    path: bytes

    def encode(self) -> bytes:
        """The entry's bytes."""
        return u32(self.position) + self.device.fields() + self.path


@dataclass(frozen=True, slots=True)
class Roster:
    """M2. What a device must know of the roster: its own place, and its neighbours by rank."""

    n: int
    k: int
    t: int
    root: bytes
    beacon: bytes
    position: int
    path: bytes
    neighbours: tuple[Entry, ...]

    NUMBER: ClassVar = 2

    @classmethod
    def decode(cls, data: bytes, invite_hash: bytes, n_max: int) -> Roster:
        """The roster as sent to one device."""
        reader = open_message(data, cls.NUMBER, "the roster", invite_hash)
        n, k, t = (reader.integer(4) for _ in range(3))
        if not 0 < n <= n_max or k >= n:
            raise Malformed(f"a roster of {n} with {k} neighbours each does not exist among at most {n_max}")
        root, beacon, position = reader.take(DIGEST), reader.take(DIGEST), reader.integer(4)
        length = DIGEST * depth(n)
        path = reader.take(length)
        neighbours = tuple(Entry(reader.integer(4), Advertise.read(reader), reader.take(length)) for _ in range(k))
        reader.close()
        if any(place >= n for place in (position, *(entry.position for entry in neighbours))):
            raise Malformed(f"the roster names a position that is not below {n}")
        return cls(n, k, t, root, beacon, position, path, neighbours)

    def encode(self, invite_hash: bytes) -> bytes:
        """The message."""
        fields = u32(self.n, self.k, self.t) + self.root + self.beacon + u32(self.position) + self.path
        return head(self.NUMBER, invite_hash) + fields + b"".join(entry.encode() for entry in self.neighbours)


@dataclass(frozen=True, slots=True)
class Shares:
    """M3. A device's commitment to its self seed, and a box for every neighbour, by rank."""

    commitment: bytes
    boxes: tuple[bytes, ...]

    NUMBER: ClassVar = 3

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        return head(self.NUMBER, sid) + self.commitment + b"".join(self.boxes)

    @classmethod
    def decode(cls, data: bytes, sid: bytes, k: int) -> Shares:
        """The inverse of `encode`, for k neighbours."""
        reader = open_message(data, cls.NUMBER, "the shares", sid)
        found = cls(reader.take(DIGEST), tuple(reader.take(BOX) for _ in range(k)))
        reader.close()
        return found


@dataclass(frozen=True, slots=True)
class Deliver:
    """M4. Who shared (U1), and the boxes of those among the neighbours, by position."""

    shared: frozenset[int]
    boxes: dict[int, bytes]

    NUMBER: ClassVar = 4

    def encode(self, sid: bytes, n: int) -> bytes:
        """The message; boxes are in the order of the mapping."""
        return head(self.NUMBER, sid) + bitmap(self.shared, n) + b"".join(self.boxes.values())

    @classmethod
    def decode(cls, data: bytes, sid: bytes, n: int, neighbours: Sequence[int]) -> Deliver:
        """The inverse of `encode`, for a device with these neighbours, by rank."""
        reader = open_message(data, cls.NUMBER, "the delivery", sid)
        shared = reader.bitmap(n)
        boxes = {position: reader.take(BOX) for position in neighbours if position in shared}
        reader.close()
        return cls(shared, boxes)


@dataclass(frozen=True, slots=True)
class Masked:
    """M5. Masked words as little-endian bytes, and a signature over their hash."""

    words: bytes
    signature: bytes

    NUMBER: ClassVar = 5

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        return b"".join([head(self.NUMBER, sid), self.words, self.signature])

    @classmethod
    def decode(cls, data: bytes, sid: bytes, words: int) -> Masked:
        """The inverse of `encode`, for that many words."""
        reader = open_message(data, cls.NUMBER, "the masked vector", sid)
        found = cls(reader.take(8 * words), reader.take(SIGNATURE))
        reader.close()
        return found


@dataclass(frozen=True, slots=True)
class Survivors:
    """M6. Who uploaded (U2)."""

    alive: frozenset[int]

    NUMBER: ClassVar = 6

    def encode(self, sid: bytes, n: int) -> bytes:
        """The message."""
        return head(self.NUMBER, sid) + bitmap(self.alive, n)

    @classmethod
    def decode(cls, data: bytes, sid: bytes, n: int) -> Survivors:
        """The inverse of `encode`."""
        reader = open_message(data, cls.NUMBER, "the survivor set", sid)
        found = cls(reader.bitmap(n))
        reader.close()
        return found


def survivors_digest(shared: frozenset[int], alive: frozenset[int], n: int) -> bytes:
    """What a device signs in M7: both sets."""
    return sha256(bitmap(shared, n) + bitmap(alive, n))


@dataclass(frozen=True, slots=True)
class Confirm:
    """M7. A device's signature over the survivor set that it was shown."""

    signature: bytes

    NUMBER: ClassVar = 7

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        return head(self.NUMBER, sid) + self.signature

    @classmethod
    def decode(cls, data: bytes, sid: bytes) -> Confirm:
        """The inverse of `encode`."""
        reader = open_message(data, cls.NUMBER, "the confirmation", sid)
        found = cls(reader.take(SIGNATURE))
        reader.close()
        return found


@dataclass(frozen=True, slots=True)
class Confirmations:
    """M8. What neighbours signed: digest and signature by position."""

    signed: dict[int, tuple[bytes, bytes]]

    NUMBER: ClassVar = 8

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        entries = (u32(position) + digest + signature for position, (digest, signature) in sorted(self.signed.items()))
        return head(self.NUMBER, sid) + len(self.signed).to_bytes(2, "little") + b"".join(entries)

    @classmethod
    def decode(cls, data: bytes, sid: bytes) -> Confirmations:
        """The inverse of `encode`."""
        reader = open_message(data, cls.NUMBER, "the confirmations", sid)
        count = reader.integer(2)
        signed = {position: (reader.take(DIGEST), reader.take(SIGNATURE)) for position in ascending(reader, count)}
        reader.close()
        return cls(signed)


@dataclass(frozen=True, slots=True)
class Unmask:
    """M9. One share of every neighbour in U1: (kind, share) by position."""

    shares: dict[int, tuple[int, int]]

    NUMBER: ClassVar = 9

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        entries = (
            u32(position) + bytes([kind]) + share.to_bytes(SHARE, "little")
            for position, (kind, share) in sorted(self.shares.items())
        )
        return head(self.NUMBER, sid) + len(self.shares).to_bytes(2, "little") + b"".join(entries)

    @classmethod
    def decode(cls, data: bytes, sid: bytes) -> Unmask:
        """The inverse of `encode`."""
        reader = open_message(data, cls.NUMBER, "the unmasking shares", sid)
        count = reader.integer(2)
        shares = {position: (reader.integer(1), reader.integer(SHARE)) for position in ascending(reader, count)}
        reader.close()
        if any(kind not in {SEED_SHARE, KEY_SHARE} for kind, _ in shares.values()):
            raise Malformed("a share has a kind that does not exist")
        return cls(shares)


@dataclass(frozen=True, slots=True)
class Result:
    """M10. How a session ended, signed by the server: a device keeps it as its receipt."""

    status: int
    aggregate_hash: bytes
    transcript_root: bytes
    signature: bytes = UNSIGNED

    NUMBER: ClassVar = 10

    def body(self) -> bytes:
        """What is signed."""
        return bytes([self.status]) + self.aggregate_hash + self.transcript_root

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        return head(self.NUMBER, sid) + self.body() + self.signature

    @classmethod
    def decode(cls, data: bytes, sid: bytes) -> Result:
        """The inverse of `encode`."""
        reader = open_message(data, cls.NUMBER, "the result", sid)
        found = cls(reader.integer(1), reader.take(DIGEST), reader.take(DIGEST), reader.take(SIGNATURE))
        reader.close()
        if found.status not in {DONE, ABORTED}:
            raise Malformed(f"status {found.status} does not exist")
        return found
