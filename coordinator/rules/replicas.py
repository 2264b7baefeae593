"""Replicas: leases of populations, ids that each can check, and messages about sums that they share. Pure.

Spec: docs/spec/rounds.md §5.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.errors import MalformedMessage
from coordinator.rules.task_settings import ClearReports, TaskSettings
from fedcore.codecs import RoundKey
from fedcore.report import ReportLayout
from fedcore.validation import UNDECODABLE, decoder

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


_FLOAT = np.dtype("<f8")


@dataclass(frozen=True, slots=True)
class SharedRound:
    """A round that another replica drives, as one that sums reports of it must know it. id: of its row.

    buffered: it drew its devices, and their reports belong to whichever round of its task is open when they come.
    """

    id: int
    layout: ReportLayout
    clear: ClearReports
    codec_key: RoundKey
    buffered: bool = False


class Counted(NamedTuple):
    """A report that a replica took: its assignment and device, and how many versions its model is old."""

    assignment: str
    device: str
    staleness: int = 0


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica tells the driver of one of its rounds.

    counted: the reports that it took, but for the `before` that it told of earlier.
    size: how many values the sum of all of them has that comes with this; 0 as long as there is none.
    """

    round: int
    before: int
    counted: list[Counted]
    size: int = 0


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica tells a driver at once. present: assignments whose reports are on their way to it."""

    replica: str
    present: list[str]
    shares: list[Share]


_shares = decoder(Shares)


def may_share(settings: TaskSettings) -> bool:
    """Whether replicas share the sums of a task's rounds: those in the clear whose estimator is the mean."""
    return settings.secagg is None and settings.clear.estimator == "mean"


def encode_shares(shares: Shares, sums: Sequence[NDArray[np.float64]]) -> bytes:
    """The bytes of a message, with the sums of the shares that have one."""
    return encode_frame(shares, sums, _FLOAT)


def decode_shares(data: memoryview) -> tuple[Shares, list[NDArray[np.float64] | None]]:
    """A message, and the sum of each of its shares. Raises MalformedMessage."""
    shares, sums = decode_frame(data, _shares, lambda found: [share.size for share in found.shares], _FLOAT)
    return shares, [None if one is None else one.astype(np.float64) for one in sums]


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


# Ids of assignments, which every replica can check without the driver. Pure; spec: docs/spec/rounds.md §5.
#
# An id says which replica made it, the row of its round and the place in the cohort, and a MAC binds all of that to the
# device.

_ROUND_BYTES, _SLOT_BYTES, _MAC_BYTES = 4, 3, 10
_TEXT = 23
"""Characters after the dot: together with the replica an id has 32, as many as its column."""


def assignment_id(key: bytes, replica: str, round_id: int, slot: int, device: str) -> str:
    """The id of a device's assignment. key: a secret of the replicas; round_id: of the row of the round."""
    place = round_id.to_bytes(_ROUND_BYTES, "big") + slot.to_bytes(_SLOT_BYTES, "big")
    # Of a known length first: two things that are said are never the same bytes.
    mac = hmac.digest(key, replica.encode() + place + device.encode(), "sha256")[:_MAC_BYTES]
    return f"{replica}.{base64.urlsafe_b64encode(place + mac).decode().rstrip('=')}"


def round_in(key: bytes, assignment: str, device: str) -> int | None:
    """The row id of an assignment's round; None unless a replica with this key gave it to this device."""
    replica, _, text = assignment.partition(".")
    if len(text) != _TEXT or not assignment.isascii():
        return None
    try:
        place = base64.urlsafe_b64decode(f"{text}=")[: _ROUND_BYTES + _SLOT_BYTES]
    except (binascii.Error, ValueError):
        return None
    round_id, slot = int.from_bytes(place[:_ROUND_BYTES], "big"), int.from_bytes(place[_ROUND_BYTES:], "big")
    good = hmac.compare_digest(assignment_id(key, replica, round_id, slot, device), assignment)
    return round_id if good else None


# Lease decisions: which replica drives which population, without clock or database. Spec: docs/spec/rounds.md §5.
#
# No two clocks are ever compared. Every replica counts up a beat in the database. A replica that sees another's beat
# stand still for the lease time, by a clock of its own, takes it for gone. That may be wrong: a paused process looks
# the same. So it decides only who tries to take a lease; what keeps two drivers apart is the lease's term.

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Replica:
    """A coordinator process as the others see it: its URL, and the beat that it counts up.

    steady: a clock of its own at that beat, in seconds with any origin.
    """

    id: str
    url: str
    beat: int
    draining: bool
    steady: float = 0.0


class Lease(NamedTuple):
    """The right to drive a population. holder: None when no replica has it. term: counts up whenever one takes it."""

    population: str
    holder: str | None
    term: int


class ObservedBeat(NamedTuple):
    """A beat, and since when an observer has seen no other, by the observer's clock.

    ahead_s: how far the replica's own clock is ahead of the observer's; None until the observer has seen it beat.
    """

    beat: int
    since: float
    ahead_s: float | None = None


class LeaseChanges(NamedTuple):
    """Leases that a replica should take, and populations to give back as soon as no round of theirs runs."""

    take: tuple[Lease, ...] = ()
    give_back: frozenset[str] = frozenset()


def new_replica_id() -> str:
    """An id for this process. Every process has another, since its memory ends with it."""
    return secrets.token_hex(_ID_BYTES)


def new_id(replica: str) -> str:
    """An unguessable id of a session or an assignment, at most 32 characters, that says which replica made it."""
    return f"{replica}.{secrets.token_urlsafe(16)}"


def maker_of(id_: str) -> str:
    """The replica that made a session's or an assignment's id; empty when the id has no such form."""
    replica, dot, _ = id_.partition(".")
    return replica if dot and len(replica) == 2 * _ID_BYTES else ""


def observe_beats(
    beats: Mapping[str, ObservedBeat], replicas: Iterable[Replica], now: float
) -> dict[str, ObservedBeat]:
    """The beats of `replicas` as an observer knows them after another look.

    A beat that is found at the first look may be old, so it does not say what the replica's clock shows now.
    """
    seen = {}
    for replica in replicas:
        before = beats.get(replica.id)
        if before is None:
            seen[replica.id] = ObservedBeat(replica.beat, now)
        elif before.beat != replica.beat:
            seen[replica.id] = ObservedBeat(replica.beat, now, replica.steady - now)
        else:
            seen[replica.id] = before
    return seen


def gone(beats: Mapping[str, ObservedBeat], now: float, lease_s: float) -> dict[str, int]:
    """The replicas whose beat has stood still for the lease time, with that beat."""
    return {id_: observed.beat for id_, observed in beats.items() if now - observed.since >= lease_s}


def lease_changes(
    me: Replica, others: Iterable[Replica], leases: Sequence[Lease], held: AbstractSet[str], idle: AbstractSet[str]
) -> LeaseChanges:
    """The changes that `me` should make, given the other replicas and the leases.

    All replicas compute the same shares from the same rows: they differ by one at most, and the replicas that hold most
    keep the remainder, so that no lease moves without need. A lease that `me` holds by its row but not by `held` is
    taken again: this process has no memory of its rounds.

    held: populations that `me` drives. idle: those of them without a running round, given up before others.
    """
    if me.draining:
        return LeaseChanges(give_back=frozenset(held))
    present = {replica.id for replica in others} | {me.id}
    holding = dict.fromkeys({me.id} | {replica.id for replica in others if not replica.draining}, 0)
    holding |= Counter(lease.holder for lease in leases if lease.holder in holding) | {me.id: len(held)}
    rank = sorted(holding, key=lambda id_: (-holding[id_], id_)).index(me.id)
    share = len(leases) // len(holding) + (rank < len(leases) % len(holding))
    free = [lease for lease in leases if lease.population not in held and lease.holder not in present - {me.id}]
    surplus = sorted(held, key=lambda name: (name not in idle, name))[: max(0, len(held) - share)]
    return LeaseChanges(tuple(free[: max(0, share - len(held))]), frozenset(surplus))
