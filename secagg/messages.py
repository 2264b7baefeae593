"""Messages of a session, from the invitation on, each with its one encoding. Spec: docs/spec/secagg.md §4.

`encode` gives the bytes; `decode` refuses, with Malformed, any bytes that `encode` cannot give. This module checks the
form of a message; the receiver checks the values.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secagg import encoding, errors, keys
from secagg.keys import CREDENTIAL_BYTES, DEVICE_BYTES, KEY_BYTES, SIGNATURE_BYTES, depth, sha256, u32
from secagg.packing import PackedSegment
from secagg.parameters import GraphParameters

# Beacons: the enrolment authority's signatures over rosters. They determine the neighbours of every device.
#
# For one invitation the authority never signs two rosters with the same device. So a lying server gets one draw each
# time that a device advertises. With up to 64 devices all are neighbours of each other, and nothing is drawn.
#
# Spec: docs/spec/secagg.md §3.

BEACON_BYTES = SIGNATURE_BYTES
NO_BEACON = bytes(BEACON_BYTES)


def draw_beacon(authority: Ed25519PrivateKey, invite_hash: bytes, chosen: GraphParameters, root: bytes) -> bytes:
    """The beacon of a roster, 64 bytes: the same at every draw, and unpredictable before the first."""
    return keys.sign(authority, "beacon", invite_hash, _body(chosen, root))


def check_beacon(
    authority: bytes | None, beacon: bytes, invite_hash: bytes, chosen: GraphParameters, root: bytes
) -> None:
    """Raise BadSignature unless the authority (a public key of 32 bytes; None trusts the server) drew the beacon.

    Raises GraphMismatch for any beacon if all devices are neighbours of each other.
    """
    if chosen.complete:
        if beacon != NO_BEACON:
            raise errors.GraphMismatch(
                "there is a beacon, and everyone is everyone's neighbour: nothing was to be drawn"
            )
    elif authority is not None:
        keys.verify(authority, beacon, "beacon", invite_hash, _body(chosen, root))


def _body(chosen: GraphParameters, root: bytes) -> bytes:
    """The signed bytes. They include n and k, which also decide the neighbours: else a server could try several."""
    return u32(chosen.n, chosen.k, chosen.t) + root


SUITE = 1
HONEST, ACTIVE = 0, 1
SEGMENT_TERMS = struct.Struct("<IBBBdddI")
INVITE_TERMS = struct.Struct("<BB32sQQIII32s32sH")


@dataclass(frozen=True, slots=True)
class Invite:
    """M0. The terms of a session: segments to sum, number of devices, round.

    `deadline` is in Unix seconds: credentials must be valid until then.
    """

    mode: int
    task: bytes
    round: int
    deadline: int
    n_max: int
    min_sum: int
    w_max: int
    layout_hash: bytes
    model_hash: bytes
    segments: tuple[PackedSegment, ...]

    TYPE: ClassVar = encoding.MessageType.INVITE

    @property
    def noisy(self) -> bool:
        """Whether devices add noise to their vectors."""
        return any(segment.noise for segment in self.segments)

    def body(self) -> bytes:
        """The message without its signature."""
        terms = INVITE_TERMS.pack(
            SUITE, self.mode, self.task, self.round, self.deadline, self.n_max, self.min_sum, self.w_max,
            self.layout_hash, self.model_hash, len(self.segments),
        )  # fmt: skip
        return encoding.head(self.TYPE) + terms + b"".join(_pack(segment) for segment in self.segments)

    @property
    def hash(self) -> bytes:
        """invite_hash, which M1 and sid depend on."""
        return sha256(self.body())

    @classmethod
    def decode(cls, data: bytes) -> tuple[Invite, bytes]:
        """The invitation and its signature."""
        with encoding.open_message(data, cls.TYPE, "the invitation") as reader:
            (
                suite, mode, task, number, deadline, n_max, min_sum, w_max, layout_hash, model_hash, count,
            ) = INVITE_TERMS.unpack(reader.take(INVITE_TERMS.size))  # fmt: skip
            if suite != SUITE:
                raise errors.UnsupportedSuite(
                    f"the invitation asks for suite {suite}; this end knows {SUITE}: update it"
                )
            if mode not in {HONEST, ACTIVE}:
                raise errors.Malformed(f"mode {mode} does not exist")
            if w_max == 0:
                raise errors.Malformed("a greatest weight of 0 has no meaning")
            segments = tuple(_unpack(reader.take(SEGMENT_TERMS.size)) for _ in range(count))
            signature = reader.take(SIGNATURE_BYTES)
        invite = cls(
            mode, task, number, deadline, n_max, min_sum, w_max, layout_hash, model_hash, segments
        )  # fmt: skip
        return invite, signature


def _pack(segment: PackedSegment) -> bytes:
    return SEGMENT_TERMS.pack(
        segment.size, segment.field_bits, segment.in_bits, segment.weighted,
        segment.low, segment.high, segment.norm, segment.noise,
    )  # fmt: skip


def _unpack(data: bytes) -> PackedSegment:
    size, field_bits, in_bits, weighted, low, high, norm, noise = SEGMENT_TERMS.unpack(data)
    if weighted > 1 or field_bits == 0 or not all(isfinite(value) for value in (low, high, norm)):
        raise errors.Malformed("a segment has a flag, a width or a range that does not exist")
    return PackedSegment(size, field_bits, in_bits, low, high, norm, bool(weighted), noise)


SHARE_BYTES, BOX_BYTES = 32, 80
UNSIGNED = bytes(SIGNATURE_BYTES)
SEED_SHARE, KEY_SHARE = 0, 1
DONE, ABORTED = 0, 1


@dataclass(frozen=True, slots=True)
class Advertise:
    """M1. A device's id and its keys for this session, signed, and its credential."""

    id: bytes
    mask_key: bytes
    box_key: bytes
    signature: bytes
    credential: bytes

    TYPE: ClassVar = encoding.MessageType.ADVERTISE

    @property
    def leaf(self) -> bytes:
        """The device's leaf in the roster."""
        return self.id + self.mask_key + self.box_key

    @property
    def device(self) -> bytes:
        """The device that the credential names; zeros in mode `honest`."""
        return self.credential[:DEVICE_BYTES]

    def fields(self) -> bytes:
        """The message without its head, as M2 repeats it."""
        return self.leaf + self.signature + self.credential

    def encode(self, invite_hash: bytes) -> bytes:
        """The message."""
        return encoding.head(self.TYPE, invite_hash) + self.fields()

    @classmethod
    def decode(cls, data: bytes, invite_hash: bytes) -> Advertise:
        """The inverse of `encode`."""
        with encoding.open_message(data, cls.TYPE, "the advertisement", invite_hash) as reader:
            return cls.read(reader)

    @classmethod
    def read(cls, reader: encoding.Reader) -> Advertise:
        """The fields, from the middle of a message."""
        return cls(*(reader.take(size) for size in (*3 * (KEY_BYTES,), SIGNATURE_BYTES, CREDENTIAL_BYTES)))


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """A neighbour in M2: its position, its advertisement, and the path of its leaf."""

    position: int
    device: Advertise
    path: bytes

    def encode(self) -> bytes:
        """The entry's bytes."""
        return u32(self.position) + self.device.fields() + self.path


@dataclass(frozen=True, slots=True)
class Roster:
    """M2. A device's view of the roster: its own position, and its neighbours by rank."""

    n: int
    k: int
    t: int
    root: bytes
    beacon: bytes
    position: int
    path: bytes
    neighbours: tuple[RosterEntry, ...]

    TYPE: ClassVar = encoding.MessageType.ROSTER

    @classmethod
    def decode(cls, data: bytes, invite_hash: bytes, n_max: int) -> Roster:
        """The roster as sent to one device."""
        with encoding.open_message(data, cls.TYPE, "the roster", invite_hash) as reader:
            n, k, t = (reader.integer(4) for _ in range(3))
            if not 0 < n <= n_max or k >= n:
                raise errors.Malformed(f"a roster of {n} with {k} neighbours each does not exist among at most {n_max}")
            root, beacon, position = reader.take(encoding.DIGEST_BYTES), reader.take(BEACON_BYTES), reader.integer(4)
            length = encoding.DIGEST_BYTES * depth(n)
            path = reader.take(length)
            neighbours = tuple(
                RosterEntry(reader.integer(4), Advertise.read(reader), reader.take(length)) for _ in range(k)
            )
        if any(place >= n for place in (position, *(entry.position for entry in neighbours))):
            raise errors.Malformed(f"the roster names a position that is not below {n}")
        return cls(n, k, t, root, beacon, position, path, neighbours)

    def encode(self, invite_hash: bytes) -> bytes:
        """The message."""
        fields = u32(self.n, self.k, self.t) + self.root + self.beacon + u32(self.position) + self.path
        return encoding.head(self.TYPE, invite_hash) + fields + b"".join(entry.encode() for entry in self.neighbours)


@dataclass(frozen=True, slots=True)
class Shares:
    """M3. A device's commitment to its self seed, and a box for every neighbour, by rank."""

    commitment: bytes
    boxes: tuple[bytes, ...]

    TYPE: ClassVar = encoding.MessageType.SHARES

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        return encoding.head(self.TYPE, sid) + self.commitment + b"".join(self.boxes)

    @classmethod
    def decode(cls, data: bytes, sid: bytes, k: int) -> Shares:
        """The inverse of `encode`, for k neighbours."""
        with encoding.open_message(data, cls.TYPE, "the shares", sid) as reader:
            return cls(reader.take(encoding.DIGEST_BYTES), tuple(reader.take(BOX_BYTES) for _ in range(k)))


@dataclass(frozen=True, slots=True)
class Deliver:
    """M4. The devices that shared (U0), and the boxes from neighbours in U0, by position."""

    shared: frozenset[int]
    boxes: dict[int, bytes]

    TYPE: ClassVar = encoding.MessageType.DELIVER

    def encode(self, sid: bytes, n: int) -> bytes:
        """The message; boxes are in the order of the mapping."""
        return encoding.head(self.TYPE, sid) + encoding.bitmap(self.shared, n) + b"".join(self.boxes.values())

    @classmethod
    def decode(cls, data: bytes, sid: bytes, n: int, neighbours: Sequence[int]) -> Deliver:
        """The inverse of `encode`, for a device with these neighbours, by rank."""
        with encoding.open_message(data, cls.TYPE, "the delivery", sid) as reader:
            shared = reader.bitmap(n)
            return cls(shared, {position: reader.take(BOX_BYTES) for position in neighbours if position in shared})


@dataclass(frozen=True, slots=True)
class _Devices:
    """A message that is only a set of positions."""

    devices: frozenset[int]

    TYPE: ClassVar[encoding.MessageType]
    NAME: ClassVar[str]

    def encode(self, sid: bytes, n: int) -> bytes:
        """The message."""
        return encoding.head(self.TYPE, sid) + encoding.bitmap(self.devices, n)

    @classmethod
    def decode(cls, data: bytes, sid: bytes, n: int) -> Self:
        """The inverse of `encode`."""
        with encoding.open_message(data, cls.TYPE, cls.NAME, sid) as reader:
            return cls(reader.bitmap(n))


class Complaints(_Devices):
    """M5. The neighbours whose boxes did not open."""

    __slots__ = ()
    TYPE, NAME = encoding.MessageType.COMPLAINTS, "the complaints"


class Included(_Devices):
    """M6. The devices that stay in the session after the boxes were opened (U1)."""

    __slots__ = ()
    TYPE, NAME = encoding.MessageType.INCLUDED, "the included devices"


class Survivors(_Devices):
    """M8. The devices that uploaded (U2)."""

    __slots__ = ()
    TYPE, NAME = encoding.MessageType.SURVIVORS, "the survivor set"


@dataclass(frozen=True, slots=True)
class Masked:
    """M7. Masked words as little-endian bytes, and a signature over their hash."""

    words: bytes
    signature: bytes

    TYPE: ClassVar = encoding.MessageType.MASKED

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        return b"".join([encoding.head(self.TYPE, sid), self.words, self.signature])

    @classmethod
    def decode(cls, data: bytes, sid: bytes, words: int) -> Masked:
        """The inverse of `encode`, for that many words."""
        with encoding.open_message(data, cls.TYPE, "the masked vector", sid) as reader:
            return cls(reader.take(8 * words), reader.take(SIGNATURE_BYTES))


def survivors_digest(shared: frozenset[int], alive: frozenset[int], n: int) -> bytes:
    """The digest that a device signs in M9, of U1 and U2."""
    return sha256(encoding.bitmap(shared, n) + encoding.bitmap(alive, n))


@dataclass(frozen=True, slots=True)
class Confirm:
    """M9. A device's signature over the survivor set that it received."""

    signature: bytes

    TYPE: ClassVar = encoding.MessageType.CONFIRM

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        return encoding.head(self.TYPE, sid) + self.signature

    @classmethod
    def decode(cls, data: bytes, sid: bytes) -> Confirm:
        """The inverse of `encode`."""
        with encoding.open_message(data, cls.TYPE, "the confirmation", sid) as reader:
            return cls(reader.take(SIGNATURE_BYTES))


@dataclass(frozen=True, slots=True)
class Confirmations:
    """M10. The confirmations of neighbours: digest and signature by position."""

    signed: dict[int, tuple[bytes, bytes]]

    TYPE: ClassVar = encoding.MessageType.CONFIRMATIONS

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        entries = (u32(position) + digest + signature for position, (digest, signature) in sorted(self.signed.items()))
        return encoding.head(self.TYPE, sid) + len(self.signed).to_bytes(2, "little") + b"".join(entries)

    @classmethod
    def decode(cls, data: bytes, sid: bytes) -> Confirmations:
        """The inverse of `encode`."""
        with encoding.open_message(data, cls.TYPE, "the confirmations", sid) as reader:
            positions = encoding.ascending(reader, reader.integer(2))
            return cls(
                {place: (reader.take(encoding.DIGEST_BYTES), reader.take(SIGNATURE_BYTES)) for place in positions}
            )


@dataclass(frozen=True, slots=True)
class Unmask:
    """M11. One share of every neighbour in U1: (kind, share) by position."""

    shares: dict[int, tuple[int, int]]

    TYPE: ClassVar = encoding.MessageType.UNMASK

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        entries = (
            u32(position) + bytes([kind]) + share.to_bytes(SHARE_BYTES, "little")
            for position, (kind, share) in sorted(self.shares.items())
        )
        return encoding.head(self.TYPE, sid) + len(self.shares).to_bytes(2, "little") + b"".join(entries)

    @classmethod
    def decode(cls, data: bytes, sid: bytes) -> Unmask:
        """The inverse of `encode`."""
        with encoding.open_message(data, cls.TYPE, "the unmasking shares", sid) as reader:
            positions = encoding.ascending(reader, reader.integer(2))
            shares = {position: (reader.integer(1), reader.integer(SHARE_BYTES)) for position in positions}
        if any(kind not in {SEED_SHARE, KEY_SHARE} for kind, _ in shares.values()):
            raise errors.Malformed("a share has a kind that does not exist")
        return cls(shares)


@dataclass(frozen=True, slots=True)
class SessionResult:
    """M12. The end of a session, signed by the server."""

    status: int
    aggregate_hash: bytes
    transcript_root: bytes
    signature: bytes = UNSIGNED

    TYPE: ClassVar = encoding.MessageType.RESULT

    @property
    def summed(self) -> bool:
        """Whether the session came to a sum."""
        return self.status == DONE

    def body(self) -> bytes:
        """The bytes that are signed."""
        return bytes([self.status]) + self.aggregate_hash + self.transcript_root

    def encode(self, sid: bytes) -> bytes:
        """The message."""
        return encoding.head(self.TYPE, sid) + self.body() + self.signature

    @classmethod
    def decode(cls, data: bytes, sid: bytes) -> SessionResult:
        """The inverse of `encode`."""
        with encoding.open_message(data, cls.TYPE, "the result", sid) as reader:
            status, digests = (
                reader.integer(1),
                (reader.take(encoding.DIGEST_BYTES), reader.take(encoding.DIGEST_BYTES)),
            )
            message = cls(status, *digests, reader.take(SIGNATURE_BYTES))
        if message.status not in {DONE, ABORTED}:
            raise errors.Malformed(f"status {message.status} does not exist")
        return message
