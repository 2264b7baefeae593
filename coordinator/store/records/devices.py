"""Rows of devices, counts of their sessions, leases of replicas and their notices, within one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import NamedTuple

from sqlalchemy import ColumnElement, bindparam, delete, func, insert, select, true, update

from coordinator.errors import LeaseLost
from coordinator.rules.entities import Device, SessionShape, Task
from coordinator.rules.replicas import Lease, Replica
from coordinator.store.records.rows import Part, adding, reader
from coordinator.store.tables import DEVICES, NOTICES, POPULATIONS, REPLICAS, SESSION_SHAPES, TALLIES
from coordinator.tally import Counts

_DEVICES = select(DEVICES, (DEVICES.c.algorithm + ":" + DEVICES.c.public_key).label("key"))
_device, _shape = reader(Device), reader(SessionShape)


class DeviceRecords(Part):
    """The operations on devices."""

    def find(self, device_id: str) -> Device | None:
        """An enrolled device; None when none has this id."""
        return self._one(_device, _DEVICES.where(DEVICES.c.id == device_id))

    def add(self, device_id: str, key: str, attestation: str) -> None:
        """Enrol a device under its public key (as text)."""
        algorithm, _, public_key = key.partition(":")
        values = {"algorithm": algorithm, "public_key": public_key, "attestation": attestation}
        self._connection.execute(insert(DEVICES).values(id=device_id, **values, enrolled_at=self.at))

    def newest(self, limit: int, *, revoked: bool) -> list[Device]:
        """The devices that enrolled last, the newest first; or those that were revoked, the last one first."""
        query = _DEVICES.order_by(DEVICES.c.enrolled_at.desc(), DEVICES.c.id)
        if revoked:
            query = _DEVICES.where(DEVICES.c.revoked_at.is_not(None)).order_by(DEVICES.c.revoked_at.desc())
        return self._all(_device, query.limit(limit))

    def counts(self) -> tuple[int, int]:
        """How many devices are enrolled, and how many of them are revoked."""
        enrolled, revoked = self._connection.execute(select(func.count(), func.count(DEVICES.c.revoked_at))).one()
        return enrolled, revoked

    def set_revoked(self, device_id: str, *, revoked: bool) -> bool:
        """Revoke a device, or allow it again; whether that changed anything."""
        this, already = DEVICES.c.id == device_id, DEVICES.c.revoked_at.is_not(None)
        change = update(DEVICES).where(this & (~already if revoked else already))
        return self._connection.execute(change.values(revoked_at=self.at if revoked else None)).rowcount == 1


_ADD = adding(SESSION_SHAPES)


class SessionCountRecords(Part):
    """The operations on session counts."""

    def add(self, counts: Counts) -> None:
        """Add to the counts."""
        if counts:
            names = ("population", "task", "shape", "count")
            rows = [dict(zip(names, (*key, count), strict=True)) for key, count in counts.items()]
            self._connection.execute(_ADD[self._connection.dialect.name], rows)

    def of_population(self, population: str) -> list[SessionShape]:
        """The counts of a population, with its tasks and without one."""
        query = select(SESSION_SHAPES).where(SESSION_SHAPES.c.population == population)
        return self._all(_shape, query)

    def of(self, task: Task) -> list[SessionShape]:
        """The counts of a task, and those of its population without a task; most frequent first."""
        mine = (SESSION_SHAPES.c.population == task.settings.population) & SESSION_SHAPES.c.task.in_(("", task.id))
        query = select(SESSION_SHAPES).where(mine).order_by(SESSION_SHAPES.c["count"].desc(), SESSION_SHAPES.c.shape)
        return self._all(_shape, query)


_HELD = select(POPULATIONS.c.name, POPULATIONS.c.term).where(POPULATIONS.c.holder == bindparam("by"))
_HELD = _HELD.with_for_update(read=True)
_REPLICAS = select(*(REPLICAS.c[name] for name in Replica.__dataclass_fields__))
_LEASES = select(*(POPULATIONS.c[name] for name in ("name", *Lease._fields[1:]))).order_by(POPULATIONS.c.name)


class LeaseRecords(Part):
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


# Made once, and so compiled once: these are asked several times a second.
_VERSIONS = select(NOTICES.c.population, NOTICES.c.version)
_NOTICES = select(NOTICES).where(NOTICES.c.population.in_(bindparam("populations", expanding=True)))
_THESE = TALLIES.c.population.in_(bindparam("populations", expanding=True))
_ANY = select(TALLIES.c.id).where(_THESE).limit(1)
_TAKE = delete(TALLIES).where(_THESE).returning(TALLIES.c.id, TALLIES.c.population, TALLIES.c.said)


class StoredNotice(NamedTuple):
    """A notice of a population, and the replica that wrote it. version: another for every other text."""

    population: str
    replica: str
    version: int
    said: str


class NoticeRecords(Part):
    """The operations on notices and tallies."""

    def changed(self, known: Mapping[str, int]) -> list[StoredNotice]:
        """The notices that have another version than is known, by population."""
        changed = [row[0] for row in self._connection.execute(_VERSIONS) if known.get(row[0]) != row[1]]
        if not changed:
            return []
        return [StoredNotice(*row) for row in self._connection.execute(_NOTICES, {"populations": changed})]

    def publish(self, population: str, replica: str, said: str) -> None:
        """Write a driver's notice in place of the last one."""
        values = {"population": population, "replica": replica, "version": 1, "said": said}
        changed = {"replica": replica, "version": NOTICES.c.version + 1, "said": said}
        new = self._insert_unless(NOTICES).on_conflict_do_update(index_elements=["population"], set_=changed)
        self._connection.execute(new, values)

    def tell(self, tallies: Iterable[tuple[str, str]]) -> None:
        """Leave tallies, each of a population, to its driver."""
        for population, said in tallies:
            self._connection.execute(insert(TALLIES).values(population=population, said=said))

    def any_told(self, populations: Iterable[str]) -> bool:
        """Whether there are tallies of these populations."""
        return self._connection.execute(_ANY, {"populations": list(populations)}).first() is not None

    def take(self, populations: Iterable[str]) -> list[tuple[str, str]]:
        """The tallies of these populations, in the order in which they came, which are deleted."""
        rows = sorted(self._connection.execute(_TAKE, {"populations": list(populations)}))
        return [(row.population, row.said) for row in rows]
