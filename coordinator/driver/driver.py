"""Driver: the one thread that changes state, and its observations, which other processes see.

It drives the populations whose leases this process holds, and writes only under those leases (see membership).
A turn: poll the store; answer from memory where that is enough; commit reports and round changes in one transaction;
only then adopt them in memory and answer; close rounds that have their reports; send away devices that waited enough.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, TypeVar

from coordinator import commands
from coordinator.driver.memory.check_in import CheckInLog, Memory
from coordinator.driver.memory.open_rounds import LoadedTask, OpenRounds
from coordinator.driver.memory.selector import Selector
from coordinator.driver.memory.sessions import Presence
from coordinator.driver.poll_store import Poller, ReplicaNotices, Revocations
from coordinator.driver.replica_membership import Membership
from coordinator.driver.writing.write_transactions import Lost, RoundCloser, Writer
from coordinator.errors import Refusal, Unavailable
from coordinator.monitoring import Metrics
from coordinator.rules.progress import GRACE_S, Observation
from coordinator.rules.states import RoundState
from coordinator.secure.round import SecureRoundFactory
from fedcore.wire.messages import CheckIn, Rejected, RetryWindow

# Observations of tasks: read from the driver's memory now and then, written where other processes see them.
#
# Pages, commands and metrics read them there (rules.progress). Observations hold times, not durations: while
# nothing but time passes, nothing is written.


_LOG = logging.getLogger(__name__)
_EVERY_S = 2.0
"""A look costs no transaction, or one for all tasks when something changed."""
_REJECTIONS_S = 60.0
"""How long a change of rejections waits for a write, if nothing else changed: a rejected check-in costs none."""


class _Written(NamedTuple):
    """An observation that was written, when, and in which term of the lease: in a later term others wrote since."""

    observation: Observation
    at: float
    term: int


@dataclass(slots=True)
class Observer:
    """Looks at tasks for a driver, on its thread and its clock."""

    selector: Selector
    arrivals: CheckInLog
    presence: Presence
    _since: dict[str, float] = field(default_factory=dict)
    _written: dict[str, _Written] = field(default_factory=dict)
    _next: float = -float("inf")

    def publish(self, membership: Membership, tasks: Mapping[str, LoadedTask], rounds: OpenRounds, now: float) -> None:
        """Look at every task when it is time, and write what changed. A failure is tried again at the next look.

        It is time at once when a task is taken up: until then pages say that it starts.
        """
        working = {id_: task for id_, task in tasks.items() if task.active or id_ in rounds.running}
        if now < self._next and working.keys() <= self._since.keys():
            return
        self._next = now + _EVERY_S
        self._written = {task: written for task, written in self._written.items() if task in working}
        self._since = {task: self._since.get(task, now) for task in working}
        seen = {id_: self._look(task, rounds, membership.quiet_s, now) for id_, task in working.items()}
        terms = {id_: membership.term(task.population) for id_, task in working.items()}
        changed = {id_: look for id_, look in seen.items() if self._is_news(id_, look, terms[id_], now)}
        if not changed:
            return
        try:
            with membership.writing() as records:
                for task, observation in changed.items():
                    records.observations.write(task, membership.id, observation.later(records.at - now))
        except Exception as error:
            # The driver's own transactions find out what is wrong, and do something about it.
            _LOG.debug("the observations of %d tasks could not be written: %s", len(changed), error)
            return
        self._written |= {task: _Written(observation, now, terms[task]) for task, observation in changed.items()}

    def _is_news(self, task: str, seen: Observation, term: int, now: float) -> bool:
        written = self._written.get(task)
        if written is None or written.term != term:
            return True
        if now < written.at + _REJECTIONS_S:
            seen = replace(seen, rejected=written.observation.rejected)
        return seen != written.observation

    def _look(self, task: LoadedTask, rounds: OpenRounds, quiet_s: float, now: float) -> Observation:
        running, members = rounds.running.get(task.id), rounds.members(task.id)
        seen = Observation(
            members=None if members is None else len(members),
            since=self._since[task.id],
            begins_at=rounds.not_before.get(task.id),
            accepted_at=self.arrivals.accepted_at(task.population),
            quiet_s=quiet_s,
        )
        if running is not None and running.value.state is not RoundState.SELECTING:
            silence = self.presence.silence(running.id, GRACE_S)
            phase, answered, asked = running.secure.standing if running.secure else ("", 0, 0)
            seen = replace(seen, silent=silence.devices, silent_since=silence.since)
            seen = replace(seen, phase=phase, answered=answered, asked=asked)
            if not seen.silent and not running.draws_more(now):
                # Devices for the next round: how many wait changes all the time, and means nothing.
                return seen
        waiting = self._waiting(task, rounds, now)
        eligible, rejected = waiting.pop("", 0), dict(self.arrivals.lately(task.id, now))
        return replace(seen, eligible=eligible, ineligible=waiting, rejected=rejected)

    def _waiting(self, task: LoadedTask, rounds: OpenRounds, now: float) -> dict[str, int]:
        """How many devices wait, by the obstacle between them and a task; "" is those that could be drawn."""
        sessions, running = self.selector.sessions, rounds.running.get(task.id)
        obstacles = sessions.obstacles(task.population, task.id, task.needs)
        replacing = running is not None and running.reporting
        drawn = running.devices if running is not None and replacing else frozenset()
        left_out = self.selector.left_out(task, rounds, 0 if replacing else rounds.rounds_before_draw(task.id)) - drawn
        members = rounds.members(task.id)
        unreliable, separated = rounds.unreliable.get(task.id), task.settings.separation is not None
        if not (replacing or left_out or unreliable or members is not None or separated):
            return dict(obstacles)
        round_ = running or rounds.held.get(task.id)
        if round_ is None:
            in_time = eligible = len(self.selector.eligible(task, rounds, now))
        else:
            in_time = len(self.selector.in_time(round_, rounds, now))
            eligible = len(self.selector.candidates(round_, rounds, now))
        fitting = [session.device for session in sessions.eligible(task.population, task.id, task.needs)]
        again, left = sum(device in drawn for device in fitting), sum(device in left_out for device in fitting)
        others = 0 if members is None else sum(device not in members | left_out for device in fitting)
        resting = obstacles[""] - again - left - others - in_time
        why = {"again": again, "left-out": left, "other-cohort": others, "resting": resting}
        why |= {"unreliable": in_time - eligible}
        return dict(obstacles + Counter({"": eligible - obstacles[""]} | why))


# Driver: the one thread that changes state. Commands queue up for it; each of its turns commits their changes.


def answer_from_memory(memory: Memory, queued: commands.QueuedCommand, now: float) -> None:
    """Answer a command, or park its future until there is an answer; leave those that need a transaction."""
    future = queued.future
    try:
        match queued.command:
            case commands.CheckInDevice() as command:
                commands.settle(future, memory.check_ins.check_in(command, now))
            case commands.AwaitAssignment() as command:
                memory.check_ins.wait(command, future, now)
            case commands.CancelWait() as command:
                memory.check_ins.cancel_wait(command, now)
                commands.settle(future, None)
            case commands.PutMessage(assignment) as command:
                round_ = memory.secure.of(assignment)
                round_.receive(command, now)
                if command.then is not None:
                    round_.wait(
                        commands.AwaitMessage(assignment, command.number + 1, command.wait_s), command.then, now
                    )
                commands.settle(future, None)
            case commands.AwaitMessage(assignment) as command:
                memory.secure.of(assignment).wait(command, future, now)
            case commands.ExchangeMasked() as command:
                commands.settle(future, memory.secure.exchange(command, now))
            case commands.AbortAssignment(assignment):
                # To stop waiting for it is right whether or not the row can be written.
                memory.secure.leave(assignment)
    except Refusal as refusal:
        commands.settle(future, refusal)


T = TypeVar("T")

_TICK_S = 0.05
_BATCH = 512
_READ_S = 5.0
"""How long the database may go unread; it is read several times a second."""


class Driver:
    """Runs the rounds of every task in the populations that this process holds under `membership`.

    clock: seconds, with any origin. source: the random source that draws cohorts; the system's own by default.
    `metrics` counts what happens. `presence` and `shared` may be used from any thread.
    """

    def __init__(
        self,
        membership: Membership,
        secure: SecureRoundFactory,
        retry: RetryWindow,
        queue_limit: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        source: random.Random | None = None,
    ) -> None:
        self.metrics = Metrics()
        self._membership = membership
        self._clock = clock
        self._inbox = commands.Inbox(queue_limit)
        self._thread = threading.Thread(target=self._loop, name="driver")
        self._draining, self._stopping = threading.Event(), threading.Event()
        self._fetched: deque[tuple[str, str]] = deque(maxlen=_BATCH * 16)
        self._memory = memory = Memory(membership.id, retry, self._of_returns, clock)
        self.presence, self.shared = memory.presence, memory.shared
        selector = Selector(memory.sessions, source or random.SystemRandom(), secure, memory.participation)
        self.revocations = Revocations(memory)
        self._board = board = ReplicaNotices(membership, memory, retry, self._of_returns)
        lineage = secure.lineage.signer
        self._poller = Poller(membership, memory, self.metrics, self.revocations, board, self._draining, lineage)
        self._writer = Writer(membership, memory, selector, self.metrics)
        self._closer = RoundCloser(membership, memory, self._writer, self.metrics, secure.lineage)
        self._observer = Observer(selector, memory.check_ins.arrivals, memory.presence)

    @property
    def alive(self) -> bool:
        """Whether commands are being answered."""
        return self._thread.is_alive()

    @property
    def obstacle(self) -> str:
        """What was wrong with the database at the last try; empty when nothing was. From any thread."""
        now = self._clock()
        if now > self._poller.read_at + _READ_S:
            return "the database cannot be read"
        return "the database cannot be written" if self._membership.missed_beats(now) else ""

    @property
    def draining(self) -> bool:
        """Whether devices are sent away because the service is about to stop."""
        return self._draining.is_set()

    def queue_depth(self) -> int:
        """Commands that wait for the next turn."""
        return len(self._inbox)

    def recover(self) -> None:
        """Join the replicas and take the populations that are free: their open rounds are abandoned and tried again."""
        now = self._clock()
        self._membership.announce(now)
        self._poller.poll(now)
        self._writer.start(now)

    def start(self) -> None:
        """Recover, then answer commands until `stop`."""
        self.recover()
        self._thread.start()

    def drain(self) -> None:
        """Send waiting and arriving devices away, and give back populations that are idle; reports are still taken."""
        self._draining.set()
        self.shared.leaving = True

    def stop(self) -> None:
        """Drain, answer what is queued, give everything back, and end the thread."""
        self.drain()
        self._stopping.set()
        self._inbox.wake()
        self._thread.join()

    def submit(self, command: commands.Command[T]) -> Future[T]:
        """Queue a command. Raises Unavailable when too many wait already, or the driver is stopping."""
        try:
            if self._stopping.is_set():
                raise queue.Full
            return self._inbox.put(command)
        except queue.Full as error:
            self.metrics.shed.labels("queue").inc()
            raise Unavailable("too many requests are waiting, or the service is stopping; come back later") from error

    def turn_away(self, command: commands.CheckInDevice) -> Rejected | None:
        """Reject at once a check-in that no task can use; None if the driver of its population must decide.

        Thread-safe.
        """
        return self._memory.check_ins.turn_away(command, self._clock())

    def follows(self, population: str) -> bool:
        """Whether another replica drives a population, and this one knows enough of it to turn devices away."""
        return population in self._memory.check_ins.followed

    def stated(self, population: str, message: CheckIn, now: float) -> None:
        """Count, from any thread, which versions of models a check-in stated, at a time in seconds since 1970."""
        self._memory.model_counts.count(population, message, now)

    def heard_of(self, replica: str) -> None:
        """Note, from any thread, that another replica lives that may sum reports of rounds here."""
        self._memory.heard_of[replica] = self._clock()

    def fetched(self, device: str, sha256: str) -> None:
        """Note, from any thread, that a device was given a blob."""
        self._fetched.append((device, sha256))

    def turn(self, inbox: Sequence[commands.QueuedCommand]) -> None:
        """Do everything that is due now, and answer `inbox`."""
        memory, now = self._memory, self._clock()
        memory.check_ins.closed = self._draining.is_set()
        self._poller.poll_if_due(inbox, now)
        while self._fetched:
            memory.sessions.fetched(*self._fetched.popleft())
        for queued in inbox:
            answer_from_memory(memory, queued, now)
        # Not while a transaction must be tried again: what it would lose is lost with the next one that is written.
        lost = self._lost(now) if self._writer.ready(now) else {}
        memory.secure.advance(now)
        durable = [(command, future) for command, future in inbox if isinstance(command, commands.DurableCommand)]
        self._writer.write(durable, lost, now)
        if self._writer.ready(now):
            if self._closer.close_rounds(now):
                self._poller.next_poll = now
            self._observer.publish(self._membership, memory.tasks, memory.rounds, now)
            self._board.exchange(now)
        self._send_away(now)
        self.metrics.waiting.set(memory.sessions.count())

    def _of_returns(self) -> bytes:
        """The key of return tokens, as it is now."""
        return self._membership.keys.of_returns

    def _lost(self, now: float) -> Lost:
        """Assignments whose devices are not heard of any more, by round; none while devices are sent away."""
        memory = self._memory
        lost: Lost = {} if memory.check_ins.closed else memory.presence.lost()
        for assignment in chain.from_iterable(lost.values()):
            memory.secure.lose(assignment, now)
        return lost

    def _send_away(self, now: float) -> None:
        """Send away the devices that waited enough; once the service is about to stop, all of them."""
        memory = self._memory
        memory.check_ins.dismiss(now)
        if memory.check_ins.closed:
            memory.presence.dismiss()
            stopping = Unavailable("the coordinator is stopping, and abandons the secure rounds that run")
            memory.secure.dismiss(stopping, {round_.id for round_ in memory.rounds})

    def _wait(self) -> Sequence[commands.QueuedCommand]:
        """The commands of the next turn, which comes with the next poll at the latest: sooner if a deadline may end."""
        memory, until_poll_s = self._memory, max(0.0, self._poller.next_poll - self._clock())
        if memory.sessions.count() or self._writer.waits or any(True for _ in memory.rounds):
            return self._inbox.take(_BATCH, min(_TICK_S, until_poll_s))
        return self._inbox.take(_BATCH, until_poll_s, asleep=True)

    def _loop(self) -> None:
        while not self._stopping.is_set() or self._inbox or self._writer.waits:
            inbox = self._wait()
            try:
                with self.metrics.turns.time():
                    self.turn(inbox)
            except Exception:
                # A bug, or a database that cannot even be read: the thread must outlive it, and no request may hang.
                _LOG.exception("a turn failed")
                for queued in inbox:
                    commands.settle(queued.future, Unavailable("the coordinator failed; nothing was counted"))
                time.sleep(_TICK_S)
        self._memory.check_ins.closed = True
        now = self._clock()
        self._memory.drop_populations(self._membership.held, now)
        self._writer.commit((), (), {}, now)
        try:
            self._membership.leave()
        except Exception as error:
            _LOG.error("the leases could not be given back; others take over when they have run out: %s", error)
