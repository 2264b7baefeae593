"""Lease decisions: which replica drives which population, without clock or database. Spec: docs/spec/rounds.md §5.

No two clocks are ever compared. Every replica counts up a beat in the database. A replica that sees another's beat
stand still for the lease time, by a clock of its own, takes it for gone. That may be wrong: a paused process looks the
same. So it decides only who tries to take a lease; what keeps two drivers apart is the lease's term.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

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
