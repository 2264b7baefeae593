"""The noticeboard: what drivers of populations and the other replicas tell each other in the store.

A driver publishes what decides that a device is sent away; the others send devices away by it, and leave tallies for
the driver. So these devices cost the driver nothing, but for a row a second. Spec: docs/spec/rounds.md §5.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from coordinator.driver.memory.followed import Followed
from coordinator.driver.memory.in_memory_state import Memory
from coordinator.driver.memory.loaded_task import LoadedTask
from coordinator.driver.memory.pace_steering import Steering
from coordinator.driver.replica_membership import Membership
from coordinator.rules.notices import Notice, notice_of, tally_of, text_of
from coordinator.rules.selection import Needs
from coordinator.store.records.notice import StoredNotice
from coordinator.store.records.records import Records
from fedcore.decoding import UNDECODABLE
from fedcore.wire.messages import RetryWindow

Facts: TypeAlias = tuple[bytes, dict[str, Needs]]
"""The generation of a population's return tokens, and the needs of its active tasks."""
_LOG = logging.getLogger(__name__)
_EVERY_S = 1.0
"""How often tallies are told and taken."""
_AGAIN_S = 0.25
"""The pause after a failure."""


@dataclass(slots=True)
class Noticeboard:
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
    _seen: Mapping[str, LoadedTask] | None = None
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
