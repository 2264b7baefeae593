"""The invitation to a session, M0: the terms that the server signs. Spec: docs/spec/secagg.md §4."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

from secagg.credentials import SIGNATURE_BYTES
from secagg.encoding import head, open_message
from secagg.errors import Malformed, UnsupportedSuite
from secagg.merkle import sha256
from secagg.message_type import MessageType
from secagg.packing import PackedSegment

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

    TYPE: ClassVar = MessageType.INVITE

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
        return head(self.TYPE) + terms + b"".join(_pack(segment) for segment in self.segments)

    @property
    def hash(self) -> bytes:
        """invite_hash, which M1 and sid depend on."""
        return sha256(self.body())

    @classmethod
    def decode(cls, data: bytes) -> tuple[Invite, bytes]:
        """The invitation and its signature."""
        with open_message(data, cls.TYPE, "the invitation") as reader:
            (
                suite, mode, task, number, deadline, n_max, min_sum, w_max, layout_hash, model_hash, count,
            ) = INVITE_TERMS.unpack(reader.take(INVITE_TERMS.size))  # fmt: skip
            if suite != SUITE:
                raise UnsupportedSuite(f"the invitation asks for suite {suite}; this end knows {SUITE}: update it")
            if mode not in {HONEST, ACTIVE}:
                raise Malformed(f"mode {mode} does not exist")
            if w_max == 0:
                raise Malformed("a greatest weight of 0 has no meaning")
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
        raise Malformed("a segment has a flag, a width or a range that does not exist")
    return PackedSegment(size, field_bits, in_bits, low, high, norm, bool(weighted), noise)
