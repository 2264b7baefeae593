"""Polling of the store, several times a second: tasks, leases, revocations, and notices between replicas."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from coordinator.commands import CheckInDevice, QueuedCommand
from coordinator.driver.memory import open_rounds
from coordinator.driver.memory.check_in import Followed, Memory
from coordinator.driver.memory.pace_steering import Steering
from coordinator.driver.replica_membership import Membership
from coordinator.errors import Unavailable
from coordinator.monitoring import Metrics
from coordinator.rules.alerts import Action
from coordinator.rules.entities import Task
from coordinator.rules.pacing import Notice, notice_of, tally_of, text_of
from coordinator.rules.selection import Needs
from coordinator.rules.states import TaskState
from coordinator.store.records.records import Records
from coordinator.store.records.rounds import StoredNotice
from fedcore.validation import UNDECODABLE
from fedcore.wire.messages import RetryWindow


class Revocations:
    """The devices that were revoked since this process began: others have no key in its memory.

    Entries of the audit log become visible in the order of their numbers, so none is missed, whatever the clocks say.
    changed: hears the devices whenever they change.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._seen: int | None = None
        self._devices: frozenset[str] = frozenset()
        self.changed: Callable[[frozenset[str]], None] = lambda _: None

    def learn(self, records: Records) -> None:
        """Look for news: a revoked device stops waiting, and its assignments are lost."""
        last = records.audit.last()
        seen = last if self._seen is None else self._seen
        news = records.audit.about_devices(seen) if last > seen else []
        for device, action in news:
            if action is Action.DEVICE_ALLOWED:
                self._devices -= {device}
            else:
                self._devices |= {device}
        if news:
            self.changed(self._devices)
        for device in {device for device, _ in news} & self._devices:
            self._memory.revoke(device)
        self._seen = last


# The noticeboard: what drivers of populations and the other replicas tell each other in the store.
#
# A driver publishes what decides that a device is sent away; the others send devices away by it, and leave tallies for
# the driver. So these devices cost the driver nothing, but for a row a second. Spec: docs/spec/rounds.md §5.

Facts: TypeAlias = tuple[bytes, dict[str, Needs]]
"""The generation of a population's return tokens, and the needs of its active tasks."""
_LOG = logging.getLogger(__name__)
_EVERY_S = 1.0
"""How often tallies are told and taken."""
_AGAIN_S = 0.25
"""The pause after a failure."""


@dataclass(slots=True)
class ReplicaNotices:
    """Reads and writes notices and tallies. Only the driver's thread uses it.

    bounds: of retry windows. key: what authenticates return tokens.
    """

    membership: Membership
    memory: Memory
    bounds: RetryWindow
    key: Callable[[], bytes]
    _stored: dict[str, StoredNotice] = field(default_factory=dict)
    _following: dict[str, tuple[StoredNotice, Followed]] = field(default_factory=dict)
    _published: dict[str, Facts] = field(default_factory=dict)
    _untold: list[tuple[str, str]] = field(default_factory=list)
    _seen: Mapping[str, open_rounds.LoadedTask] | None = None
    _told: bool = False
    """Whether other replicas have left tallies for this one."""
    _next: float = -float("inf")
    _again: float = -float("inf")
    """Not before, after a failure."""

    def read(self, records: Records, now: float) -> None:
        """Follow the notices of the other replicas, as they are now."""
        changed = records.notices.changed({name: stored.version for name, stored in self._stored.items()})
        self._stored |= {stored.population: stored for stored in changed}
        self._told = records.notices.any_told(self.membership.held)
        following = {name: (stored, self._follow(stored)) for name, stored in self._stored.items()}
        self._following = {name: (stored, one) for name, (stored, one) in following.items() if one is not None}
        known = {name: self.membership.ahead_s(stored.replica, now) for name, (stored, _) in self._following.items()}
        for name, ahead_s in known.items():
            if ahead_s is not None:
                self._following[name][1].ahead_s = ahead_s
        self.memory.check_ins.followed = {
            name: followed for name, (_, followed) in self._following.items() if known[name] is not None
        }

    def exchange(self, now: float) -> None:
        """Publish what has changed; once a second, leave and take tallies. A failure is tried again."""
        due, tasks = now >= self._next, self.memory.tasks
        if now < self._again or (tasks is self._seen and not due):
            return
        facts = {name: self._facts(name) for name in self.membership.held}
        self._published = {name: before for name, before in self._published.items() if name in facts}
        news = {name for name, known in facts.items() if self._published.get(name) != known}
        if due:
            self._next = now + _EVERY_S
            tallies = ((name, followed.take()) for name, (_, followed) in self._following.items())
            self._untold += [(name, text_of(tally)) for name, tally in tallies if tally is not None]
        told = due and self._told
        try:
            if news or told or self._untold:
                self._write(facts, news, told, now)
        except Exception as error:
            # The driver's own transactions find out what is wrong, and do something about it.
            _LOG.debug("replicas could not be told who was sent away: %s", error)
            self._again = now + _AGAIN_S
            return
        self._seen, self._published, self._untold = tasks, facts, []

    def _write(self, facts: Mapping[str, Facts], news: set[str], told: bool, now: float) -> None:
        with self.membership.writing() as records:
            if told:
                for name, said in records.notices.take(facts):
                    self._hear(name, said, now)
                    news.add(name)
            for name in news:
                generation, needs = facts[name]
                notice = Notice(generation=generation, tasks=needs, idle_until=self._steering.idle_until(name, now))
                records.notices.publish(name, self.membership.id, text_of(notice))
            records.notices.tell(self._untold)

    def _hear(self, population: str, said: str, now: float) -> None:
        """Take over a tally. If that is undone, its devices are remembered, and do not count again."""
        try:
            tally = tally_of(said)
        except UNDECODABLE:  # another version's
            return
        if tally.generation != self._steering.generation(population):  # of another driver, or before a new task
            return
        self._steering.heard(population, tally.each(), now)
        self.memory.check_ins.arrivals.heard(tally.obstacles, now)

    def _facts(self, population: str) -> Facts:
        tasks = self.memory.tasks.values()
        needs = {task.id: task.needs for task in tasks if task.active and task.population == population}
        return self._steering.generation(population), needs

    def _follow(self, stored: StoredNotice) -> Followed | None:
        """The population of a notice; None if another replica drives it now, or the notice is another version's."""
        if self.membership.directory.holders.get(stored.population) != stored.replica:
            return None
        before, followed = self._following.get(stored.population, (None, None))
        try:
            if followed is None or before is None or before.replica != stored.replica:
                return Followed(notice_of(stored.said), self.bounds, self.key)
            if before.version != stored.version:
                followed.renew(notice_of(stored.said))
        except UNDECODABLE:
            return None
        return followed

    @property
    def _steering(self) -> Steering:
        return self.memory.steering


_POLL_S = 0.25


@dataclass(slots=True)
class Poller:
    """Keeps leases, populations and tasks in memory up to date. Only the driver's thread uses it.

    next_poll: when it is time to look again. read_at: when it last could. draining: set when the service is about to
    stop. lineage: the public key with which this coordinator signs checkpoints.
    """

    membership: Membership
    memory: Memory
    metrics: Metrics
    revocations: Revocations
    board: ReplicaNotices
    draining: threading.Event
    lineage: str
    next_poll: float = -math.inf
    read_at: float = -math.inf
    _unreadable: set[str] = field(default_factory=set)
    """Paused tasks with blobs that could not be read: not tried again before they are resumed."""

    def poll_if_due(self, inbox: Sequence[QueuedCommand], now: float) -> None:
        """Poll when it is time, or at once when a device asks for a population that was made since."""
        try:
            if now >= self.next_poll or self._asks_for_new(inbox):
                self.poll(now)
        except Exception as error:
            # Answers from memory go on, and nothing is written without the leases.
            if not isinstance(error, Unavailable):  # the log says why already
                _LOG.exception("the database could not be looked at")
            self.memory.check_ins.blind = True
            self.next_poll = now + _POLL_S

    def poll(self, now: float) -> None:
        """Beat, take and give back leases, load the tasks of the populations that this process drives."""
        membership, memory = self.membership, self.memory
        if self.draining.is_set():
            membership.drain()
        idle = membership.held - {round_.task.population for round_ in memory.rounds}
        memory.drop_populations(membership.refresh(now, idle), now)
        with membership.store.database.reading() as records:
            active = records.tasks(TaskState.ACTIVE, TaskState.PAUSED)
            driven = [task for task in active if task.settings.population in membership.held]
            memory.participation.learn(records, driven, now)
            self.revocations.learn(records)
            self.board.read(records, now)
            memory.shared.follow(records.attempts.states(memory.shared))
            at = records.at
            for record in driven:
                loaded_before = memory.tasks.get(record.id)
                if loaded_before is None:
                    memory.rounds.unreliable[record.id] = open_rounds.unreliable_devices(records, record)
                if record.settings.secagg is not None and (loaded_before is None or not loaded_before.active):
                    # Of a task that is paused an operator may end the round.
                    next_round = records.snapshot(record).number + 1
                    memory.rounds.left_out[record.id] = records.left_out(record.id, next_round)
        memory.participation.leave_out(memory.rounds.left_out)
        loaded = [task for record in driven if (task := self._load(record, at)) is not None]
        memory.tasks = {task.id: task.paused() if task.population in membership.leaving else task for task in loaded}
        self.next_poll, self.read_at, memory.check_ins.blind = now + _POLL_S, now, False
        memory.secure.forget(now)
        memory.check_ins.learn(membership.populations, membership.held, memory.tasks.values(), memory.rounds, now)
        self.metrics.populations.set(len(membership.held))

    def _load(self, record: Task, at: float) -> open_rounds.LoadedTask | None:
        """The task as it stands. While a blob of it cannot be read it is as it was loaded last, and opens no round."""
        before = self.memory.tasks.get(record.id)
        if record.state is TaskState.PAUSED and record.id in self._unreadable:
            return before
        self._unreadable.discard(record.id)
        if before is None:  # a key does not change while its process runs
            record = open_rounds.with_lineage_back(self.membership, record, self.lineage, at)
        record = open_rounds.with_good_release(self.membership, record, self.lineage, at)
        task = open_rounds.load_task(self.membership, record, self.lineage, before, at)
        if task is not None:
            return task
        self._unreadable.add(record.id)
        return None if before is None else before.paused()

    def _asks_for_new(self, inbox: Sequence[QueuedCommand]) -> bool:
        # One look-up for all of them: a check-in to a population that no operator has made must cost hardly anything.
        asked = {queued.command.population for queued in inbox if isinstance(queued.command, CheckInDevice)}
        unknown = asked - self.memory.check_ins.populations
        if not unknown:
            return False
        with self.membership.store.database.reading() as records:
            return not unknown.isdisjoint(records.populations())
