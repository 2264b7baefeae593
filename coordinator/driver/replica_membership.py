"""A replica's membership: its row, the populations it drives, and the addresses of the others.

Only the driver's thread changes it; any thread may read `directory` and `missed_beats`. The decisions are in
coordinator.rules.replicas.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from coordinator.errors import DatabaseLocked
from coordinator.keys import Keys
from coordinator.rules import replicas as replica_rules
from coordinator.rules.progress import NO_DEVICES_AFTER_H
from coordinator.store.records.records import Records
from coordinator.store.tasks import CoordinatorStore

_LOG = logging.getLogger(__name__)
_BEATS = 3
"""Beats in a lease time: two may fail before the others take the populations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """The settings of a process as one of the replicas.

    lease_s: how long a beat may stand still. drives: whether it takes populations. quiet_s: as of `Observation`.
    """

    lease_s: float
    drives: bool = True
    quiet_s: float = NO_DEVICES_AFTER_H * 3600
    id: str = field(default_factory=replica_rules.new_replica_id)


@dataclass(frozen=True, slots=True)
class Directory:
    """The URL of every replica by its id, and the replica that drives each population, for those that are driven."""

    urls: Mapping[str, str] = field(default_factory=dict)
    holders: Mapping[str, str] = field(default_factory=dict)


class Membership:
    """The leases under which this process works on `store`, and its view of the other replicas.

    ousted: another replica has its URL. superseded: the store knows a key that succeeds that of this process, whose
    file still holds the old one. In both cases it gives its populations back.
    """

    def __init__(self, store: CoordinatorStore, config: ReplicaConfig, keys: Keys) -> None:
        self.store = store
        self._database = store.database
        self._config = config
        self.keys = keys
        self._me = replica_rules.Replica(config.id, "", beat=0, draining=False)
        self._held: dict[str, int] = {}
        self._beats: dict[str, replica_rules.ObservedBeat] = {}
        self._next_beat = -float("inf")
        self._beat_at = -float("inf")
        self.ousted = self.superseded = False
        self.took_over: Callable[[], None] = lambda: None
        """Called when this process has taken populations that others may have driven."""
        self.directory = Directory()
        self.populations: frozenset[str] = frozenset()
        """Every population that devices may check in to, as `refresh` saw them first."""
        self.leaving: frozenset[str] = frozenset()

    @property
    def id(self) -> str:
        """This process."""
        return self._me.id

    @property
    def lease_s(self) -> float:
        """How long a beat may stand still."""
        return self._config.lease_s

    @property
    def quiet_s(self) -> float:
        """How long no check-in may be accepted, in seconds, before tasks count as stalled."""
        return self._config.quiet_s

    @property
    def held(self) -> frozenset[str]:
        """The populations that this process drives."""
        return frozenset(self._held)

    def term(self, population: str) -> int:
        """The term of the lease of a population that this process drives."""
        return self._held[population]

    @property
    def url(self) -> str:
        """Where the other replicas reach this process; "" before it listens."""
        return self._me.url

    def missed_beats(self, now: float) -> bool:
        """Whether this process could write no beat for so long that the others take its populations."""
        return self._config.drives and now > self._beat_at + self._config.lease_s

    def listen_at(self, url: str) -> None:
        """Set the URL of this process, before anything else; it succeeds the replica that had the URL before."""
        self._me = replace(self._me, url=url)

    def ahead_s(self, replica: str, now: float) -> float | None:
        """How far the clock of another replica is ahead of this one's; None before it was seen to beat, or not lately.

        What stops beats for the lease time may be its death.
        """
        observed = self._beats.get(replica)
        return None if observed is None or now - observed.since >= self._config.lease_s else observed.ahead_s

    def read_directory(self) -> Directory:
        """The directory as it is now in the database; from any thread."""
        with self._database.reading() as records:
            return _directory(records.leases.replicas(), records.leases.leases())

    def announce(self, now: float) -> None:
        """Write this process's row, in place of an earlier process at its URL."""
        if not self._config.drives:
            return
        self._me = replace(self._me, steady=now)
        with self._database.writing() as records:
            records.leases.succeed(self._me)
        self._beat_at, self._next_beat = now, now + self._config.lease_s / _BEATS

    def refresh(self, now: float, idle: AbstractSet[str]) -> frozenset[str]:
        """Beat when it is time, read the others' rows, take and give back leases; answers populations that are lost.

        All is read in one transaction, and once more after a beat: this is done several times a second.

        idle: populations of `held` without a running round. A population that is to be given back but has one is in
        `leaving`: no other round should be opened there.
        """
        with self._database.reading() as records:
            key, replicas, leases = records.identity.get("server"), records.leases.replicas(), records.leases.leases()
        self._check_key(key)
        # Before leases are taken: a population that is made meanwhile is not known yet, rather than not driven.
        self.populations = frozenset(lease.population for lease in leases)
        if self._config.drives and now >= self._next_beat:
            with _tried_again_later():
                self._beat(now)
                self._beat_at, self._next_beat = now, now + self._config.lease_s / _BEATS
            with self._database.reading() as records:
                replicas, leases = records.leases.replicas(), records.leases.leases()
        self.directory = _directory(replicas, leases)
        mine = {lease.population: lease.term for lease in leases if lease.holder == self.id}
        lost = frozenset(population for population, term in self._held.items() if mine.get(population) != term)
        self.drop(lost)
        others = [replica for replica in replicas if replica.id != self.id]
        # A beat that this process could not write either says nothing of others: what stops one may stop all.
        blind = self._config.drives and now >= self._next_beat
        self._beats = {} if blind else replica_rules.observe_beats(self._beats, others, now)
        if not self._config.drives:
            return lost
        dead = replica_rules.gone(self._beats, now, self._config.lease_s)
        others = [replica for replica in others if replica.id not in dead]
        me = replace(self._me, draining=True) if self.ousted else self._me
        chosen = replica_rules.lease_changes(me, others, leases, self.held, idle)
        before = self.held
        with _tried_again_later():
            self._give_back(chosen.give_back & idle)
            self._take(chosen, dead)
        self.leaving = chosen.give_back & self.held
        return lost | (before - self.held)

    def drop(self, populations: frozenset[str]) -> None:
        """Stop driving populations that were lost."""
        for population in populations:
            del self._held[population]
        if populations:
            _LOG.warning("lost %s to another replica", ", ".join(sorted(populations)))

    def _check_key(self, stored_key: str | None) -> None:
        superseded = not self.keys.hold(stored_key)
        if superseded is self.superseded:
            return
        if superseded:
            _LOG.error(
                "the server's key was succeeded, and this replica's file has the old one: give all the same file"
            )
        self.superseded = superseded
        self._me = replace(self._me, draining=superseded)
        self._next_beat = -float("inf")

    @contextmanager
    def writing(self) -> Iterator[Records]:
        """A driver's only way to write: a transaction that cannot commit once another replica has taken over.

        Raises LeaseLost; DatabaseLocked, since this thread also answers devices and must wait for no lock.
        """
        with self._database.writing_at_once() as records:
            records.leases.fence(self.id, self._held)
            yield records

    def drain(self) -> None:
        """Take nothing any more; `refresh` gives back the idle populations."""
        if not self._me.draining:
            self._me = replace(self._me, draining=True)
            self._next_beat = -float("inf")

    def leave(self) -> None:
        """Give everything back and remove this process's row; the next holders abandon the rounds that are open."""
        if not self._config.drives:
            return
        with self._database.writing() as records:
            for population, term in self._held.items():
                records.leases.release(replica_rules.Lease(population, self.id, term))
            records.leases.forget(self.id)
        self._held = {}

    def _beat(self, now: float) -> None:
        self._me = replace(self._me, beat=self._me.beat + 1, steady=now)
        with self._database.writing_at_once() as records:
            if records.leases.beat(self._me):
                self.ousted = False
                return
            successors = [replica.id for replica in records.leases.replicas() if replica.url == self._me.url]
            if not successors:
                records.leases.announce(self._me)
        self.ousted = bool(successors)
        if self.ousted:
            _LOG.error("replica %s announces this replica's URL %s: give each its own", successors[0], self._me.url)
        else:
            _LOG.warning("this replica was taken for gone, and is back")

    def _take(self, chosen: replica_rules.LeaseChanges, dead: Mapping[str, int]) -> None:
        if not chosen.take and not dead:
            return
        taken = {}
        with self._database.writing_at_once() as records:
            for replica, beat in dead.items():
                records.leases.forget(replica, beat)
            for lease in chosen.take:
                if records.leases.take(lease, self.id):
                    taken[lease.population] = lease.term + 1
                    _abandon(records, lease.population)
        self._held |= taken
        if any(term > 1 for term in taken.values()):
            self.took_over()

    def _give_back(self, populations: frozenset[str]) -> None:
        if not populations:
            return
        with self.writing() as records:
            for population in populations:
                records.leases.release(replica_rules.Lease(population, self.id, self._held[population]))
        self._held = {name: term for name, term in self._held.items() if name not in populations}


@contextmanager
def _tried_again_later() -> Iterator[None]:
    """Log a failed write (on a full disk, say): it is tried again at the next poll, and the rest must go on."""
    try:
        yield
    except DatabaseLocked as error:
        _LOG.debug("a lease was not written yet: %s", error)
    except Exception as error:
        _LOG.error("a lease could not be written: %s", error)


def _directory(replicas: list[replica_rules.Replica], leases: list[replica_rules.Lease]) -> Directory:
    urls = {replica.id: replica.url for replica in replicas}
    return Directory(urls, {lease.population: lease.holder for lease in leases if lease.holder in urls})


def _abandon(records: Records, population: str) -> None:
    """End the rounds that an earlier holder left: their sums were only in its memory."""
    abandoned, _ = records.abandon_unfinished_rounds({population}, "driver-lost")
    if abandoned:
        _LOG.warning("abandoned %d rounds of population %s that another process left", abandoned, population)
