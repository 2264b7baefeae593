"""Messages between replicas and the driver of a secure round, about masked reports. Pure.

Spec: docs/spec/rounds.md §5.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.errors import MalformedMessage
from coordinator.rules.share_frames import decode_frame, encode_frame
from fedcore.decoding import UNDECODABLE, decoder

_WORD = np.dtype("<u8")


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A masked report that a replica wants to add. sha256: of its message, hexadecimal."""

    assignment: str
    sha256: str


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a claim: what the message must be, so that the replica may add it to its sum of the session.

    round: the row id. session: the id of the group's session. signer: None where messages are not signed.
    """

    round: int
    session: bytes
    position: int
    signer: bytes | None
    words: int


class Denial(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The other answer: the problem type, and its text for the device."""

    slug: str
    detail: str


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A masked report that is in a sum, and its signature."""

    assignment: str
    signature: bytes


class MaskedShare(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica tells of its sum of a session: the reports in it that the driver has not heard of.

    count: how many there are in all. size: how many words the sum has that comes with this; 0 as long as none does.
    """

    round: int
    session: bytes
    taken: list[Taken]
    count: int
    size: int = 0


class MaskedNews(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica tells a driver at once. checking: granted claims whose reports are not in a sum yet."""

    replica: str
    claims: list[Claim]
    checking: list[str]
    shares: list[MaskedShare]


class MaskedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's answer.

    outcomes: of the claims; None for a report that was taken before. wanted: the sessions whose sums must come now.
    over: those whose sums nobody needs any more.
    """

    outcomes: list[Grant | Denial | None]
    wanted: list[bytes]
    over: list[bytes]


_news, _answer = decoder(MaskedNews), decoder(MaskedAnswer)


def encode_news(news: MaskedNews, sums: Sequence[NDArray[np.uint64]]) -> bytes:
    """The bytes of a message, with the sums of the shares that have one."""
    return encode_frame(news, sums, _WORD)


def decode_news(data: memoryview) -> tuple[MaskedNews, list[NDArray[np.uint64] | None]]:
    """A message, and the sum of each of its shares, which is a view of `data`. Raises MalformedMessage."""
    return decode_frame(data, _news, lambda found: [share.size for share in found.shares], _WORD)


def decode_answer(data: bytes) -> MaskedAnswer:
    """A driver's answer. Raises MalformedMessage."""
    try:
        return _answer.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(f"this answer is another version's, run one on all replicas: {error}") from error
