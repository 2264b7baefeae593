"""Rows of replicas and of their leases, within one transaction. The rule: coordinator.rules.leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from sqlalchemy import ColumnElement, bindparam, delete, insert, select, true, update

from coordinator.errors import LeaseLost
from coordinator.rules.leases import Lease, Replica
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import POPULATIONS, REPLICAS

_HELD = select(POPULATIONS.c.name, POPULATIONS.c.term).where(POPULATIONS.c.holder == bindparam("by"))
_HELD = _HELD.with_for_update(read=True)
_REPLICAS = select(*(REPLICAS.c[name] for name in Replica.__dataclass_fields__))
_LEASES = select(*(POPULATIONS.c[name] for name in ("name", *Lease._fields[1:]))).order_by(POPULATIONS.c.name)


class LeaseRecords(WithinTransaction):
    """The operations on these rows."""

    def replicas(self) -> list[Replica]:
        """Every replica with a row."""
        return [Replica(*row) for row in self._connection.execute(_REPLICAS)]

    def seen_since(self, at: float) -> list[str]:
        """The URLs of the replicas that have beaten since then, by their own clocks."""
        return list(self._connection.scalars(select(REPLICAS.c.url).where(REPLICAS.c.seen_at > at)))

    def leases(self) -> list[Lease]:
        """The lease of every population, by name."""
        return [Lease(*row) for row in self._connection.execute(_LEASES)]

    def announce(self, me: Replica) -> None:
        """Write a replica's row. Raises IntegrityError when there is one with its URL: see `succeed`."""
        self._connection.execute(insert(REPLICAS).values(**asdict(me), seen_at=self.at))

    def succeed(self, me: Replica) -> None:
        """Write a replica's row in place of the row with its URL, which sets that replica's populations free."""
        values, new = {**asdict(me), "seen_at": self.at}, self._insert_unless(REPLICAS)
        self._connection.execute(new.on_conflict_do_update(index_elements=["url"], set_=values), values)

    def beat(self, me: Replica) -> bool:
        """Write that `me` lives; false when its row is gone: another replica declared it gone."""
        values = {"beat": me.beat, "draining": me.draining, "seen_at": self.at, "steady": me.steady}
        return self._connection.execute(update(REPLICAS).where(REPLICAS.c.id == me.id).values(**values)).rowcount == 1

    def forget(self, replica: str, beat: int | None = None) -> None:
        """Remove a replica's row, which sets its populations free; with `beat`, only if it has not moved on."""
        same = true() if beat is None else REPLICAS.c.beat == beat
        self._connection.execute(delete(REPLICAS).where((REPLICAS.c.id == replica) & same))

    def take(self, lease: Lease, holder: str) -> bool:
        """Give `holder` a lease that no present replica holds; false when another one was first."""
        present = select(REPLICAS.c.id).where(REPLICAS.c.id != holder)
        free = POPULATIONS.c.holder.is_(None) | POPULATIONS.c.holder.not_in(present)
        values = {"holder": holder, "term": lease.term + 1}
        query = update(POPULATIONS).where(_of(lease) & free).values(**values)
        return self._connection.execute(query).rowcount == 1

    def release(self, lease: Lease) -> None:
        """Release a lease. Its term stays, so that no replica ever holds it under the same term."""
        self._connection.execute(update(POPULATIONS).where(_of(lease)).values(holder=None))

    def fence(self, holder: str, held: Mapping[str, int]) -> None:
        """Hold every lease of `held` (terms by population) until the transaction ends.

        Raises LeaseLost when another replica took one: then nothing may be written that depends on it.
        """
        # Because of the lock, a replica that takes a lease waits for this transaction, or this one sees it taken.
        # SQLite needs no lock: one transaction writes at a time.
        terms = {row.name: row.term for row in self._connection.execute(_HELD, {"by": holder})}
        lost = {population for population, term in held.items() if terms.get(population) != term}
        if lost:
            raise LeaseLost(frozenset(lost))


def _of(lease: Lease) -> ColumnElement[bool]:
    return (POPULATIONS.c.name == lease.population) & (POPULATIONS.c.term == lease.term)
