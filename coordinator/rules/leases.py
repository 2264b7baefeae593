"""Which replica drives which population: decisions, without clock or database. Spec: docs/spec/rounds.md §5.

No two clocks are ever compared. Every replica counts up a beat in the database, and whoever sees that beat stand still
for the lease time, by a clock of its own, takes the replica for gone. That may be wrong: a paused process looks the
same. So it decides only who tries to take a lease; what keeps two drivers apart is the lease's term.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Replica:
    """A coordinator process, as the others see it: where they reach it, and how often it has said that it lives.

    keys: a digest of its public keys.
    """

    id: str
    url: str
    keys: str
    beat: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """Who drives a population; `holder` is None when nobody does. `term` counts up whenever somebody takes it."""

    population: str
    holder: str | None
    term: int


@dataclass(frozen=True, slots=True)
class Sight:
    """A beat, and since when an observer has seen no other, by the observer's clock."""

    beat: int
    since: float


@dataclass(frozen=True, slots=True)
class Moves:
    """What a replica should do: leases to take, and populations to give back as soon as no round of theirs runs."""

    take: tuple[Lease, ...] = ()
    leave: frozenset[str] = frozenset()


def new_replica_id() -> str:
    """An id for this process. Every process has another: what it keeps in memory ends with it."""
    return secrets.token_hex(_ID_BYTES)


def new_id(replica: str) -> str:
    """An unguessable id of a session or an assignment, at most 32 characters, that says which replica made it."""
    return f"{replica}.{secrets.token_urlsafe(16)}"


def maker_of(id_: str) -> str:
    """The replica that made a session's or an assignment's id; empty when the id has no such form."""
    replica, dot, _ = id_.partition(".")
    return replica if dot and len(replica) == 2 * _ID_BYTES else ""


def look(sights: Mapping[str, Sight], replicas: Iterable[Replica], now: float) -> dict[str, Sight]:
    """What an observer knows of `replicas` after a look at them."""
    seen = {}
    for replica in replicas:
        known = sights.get(replica.id)
        seen[replica.id] = known if known and known.beat == replica.beat else Sight(replica.beat, now)
    return seen


def gone(sights: Mapping[str, Sight], now: float, lease_s: float) -> dict[str, int]:
    """Replicas whose beat has stood still for the lease time, and at which it stands."""
    return {id_: sight.beat for id_, sight in sights.items() if now - sight.since >= lease_s}


def moves(
    me: Replica, others: Iterable[Replica], leases: Sequence[Lease], held: AbstractSet[str], idle: AbstractSet[str]
) -> Moves:
    """What `me` should do, given who else lives and who holds what.

    Everyone computes the same shares from the same rows: they differ by one at most, and whoever holds most keeps the
    remainder, so that nothing moves for the sake of order. A lease that `me` holds by its row but not by `held` is
    taken again: this process has no memory of its rounds.

    held: populations that `me` drives. idle: those of them without a running round, given up before others.
    """
    if me.draining:
        return Moves(leave=frozenset(held))
    present = {replica.id for replica in others} | {me.id}
    holding = dict.fromkeys({me.id} | {replica.id for replica in others if not replica.draining}, 0)
    holding |= Counter(lease.holder for lease in leases if lease.holder in holding) | {me.id: len(held)}
    rank = sorted(holding, key=lambda id_: (-holding[id_], id_)).index(me.id)
    share = len(leases) // len(holding) + (rank < len(leases) % len(holding))
    free = [one for one in leases if one.population not in held and one.holder not in present - {me.id}]
    surplus = sorted(held, key=lambda name: (name not in idle, name))[: max(0, len(held) - share)]
    return Moves(tuple(free[: max(0, share - len(held))]), frozenset(surplus))
