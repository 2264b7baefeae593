"""Rows of notices and tallies, within one transaction. Their meaning: coordinator.rules.notices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sqlalchemy import bindparam, delete, insert, select

from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import NOTICES, TALLIES

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


class NoticeRecords(WithinTransaction):
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
