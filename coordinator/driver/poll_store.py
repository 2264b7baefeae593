"""Polling of the store, several times a second: leases, populations and tasks."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.commands import CheckInDevice, QueuedCommand
from coordinator.driver.memory.in_memory_state import Memory
from coordinator.driver.memory.loaded_task import (
    LoadedTask,
    load_task,
    unreliable_devices,
    with_good_release,
    with_lineage_back,
)
from coordinator.driver.noticeboard import Noticeboard
from coordinator.driver.replica_membership import Membership
from coordinator.driver.revocations import Revocations
from coordinator.errors import Unavailable
from coordinator.metrics import Metrics
from coordinator.rules.entities import Task
from coordinator.rules.states import TaskState

_LOG = logging.getLogger(__name__)
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
    board: Noticeboard
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
                    memory.rounds.unreliable[record.id] = unreliable_devices(records, record)
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

    def _load(self, record: Task, at: float) -> LoadedTask | None:
        """The task as it stands. While a blob of it cannot be read it is as it was loaded last, and opens no round."""
        before = self.memory.tasks.get(record.id)
        if record.state is TaskState.PAUSED and record.id in self._unreadable:
            return before
        self._unreadable.discard(record.id)
        if before is None:  # a key does not change while its process runs
            record = with_lineage_back(self.membership, record, self.lineage, at)
        record = with_good_release(self.membership, record, self.lineage, at)
        task = load_task(self.membership, record, self.lineage, before, at)
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
