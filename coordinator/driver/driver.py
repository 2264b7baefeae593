"""The driver: the one thread that changes state. Requests queue up; each turn commits what has come, all at once.

It drives the populations whose leases this process holds, and writes under those leases only (see membership).
A turn is: look for changed tasks, answer what memory alone can answer, commit reports and round changes in one
transaction, only then adopt them in memory and answer, close rounds that have their reports, dismiss who waited enough.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from coordinator.commands import (
    Arrive,
    GiveUp,
    HangUp,
    Hear,
    Inbox,
    Report,
    Request,
    Say,
    Submission,
    Wait,
    settle,
)
from coordinator.driver.adoption import Adoption
from coordinator.driver.checkin import CheckIns
from coordinator.driver.commit import commit_round
from coordinator.driver.loading import load_job
from coordinator.driver.membership import Membership
from coordinator.driver.observation import Observer
from coordinator.driver.participation import ParticipationLimit
from coordinator.driver.presence import Presence
from coordinator.driver.running import Job, Underway
from coordinator.driver.secure_rounds import SecureRounds
from coordinator.driver.sessions import Sessions
from coordinator.driver.steering import Steering
from coordinator.driver.transaction import Selector, Transaction
from coordinator.errors import LeaseLost, Refusal, StoreConflict, Unavailable
from coordinator.failpoints import reach
from coordinator.metrics import Metrics
from coordinator.rules.aggregation import ReportSum
from coordinator.rules.rounds import RoundState, TaskState
from coordinator.secure.round import SecureRoundFactory
from coordinator.session_counts import SessionCounts
from fedcore.wire.messages import Rejected, RetryWindow

T = TypeVar("T")
Lost: TypeAlias = Mapping[int, Sequence[str]]
Durable: TypeAlias = tuple[Report | GiveUp, Future[Any]]
_LOG = logging.getLogger(__name__)
_TICK_S, _POLL_S = 0.05, 0.25
_RETRY_S = 1.0
_COUNT_S = 60.0
"""How long counts of sessions wait for a transaction that happens anyway, before they get one of their own."""
_BATCH = 512


class Driver:
    """Runs the rounds of every task in the populations that this process holds under `membership`.

    clock: seconds, from anywhere. source: the chance by which cohorts are drawn; the system's own if not given.
    `metrics` counts what happens.
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
        self._store = membership.store
        self._clock = clock
        self._inbox = Inbox(queue_limit)
        self._thread = threading.Thread(target=self._loop, name="driver")
        self._draining, self._stopping = threading.Event(), threading.Event()
        self._session_counts = SessionCounts()
        self._fetched: deque[tuple[str, str]] = deque(maxlen=_BATCH * 16)
        self._sessions = Sessions(membership.id, self._session_counts)
        self._participation = ParticipationLimit()
        self._selector = Selector(self._sessions, source or random.SystemRandom(), secure, self._participation)
        self._steering = Steering(retry)
        self._check_ins = CheckIns(self._sessions, self._participation, self._steering, self._session_counts)
        self.presence = Presence(clock)
        self._adoption = Adoption(self._sessions, self._participation, self.presence, self._steering)
        self._observer = Observer(self._selector, self._check_ins.arrivals, self.presence)
        self._jobs: dict[str, Job] = {}
        self._underway = Underway()
        self._sums: dict[int, ReportSum] = {}
        self._secure = SecureRounds()
        self._last_round: dict[str, int] = {}
        self._next_poll = self._next_try = self._next_count = -float("inf")
        self._in_doubt = False

    @property
    def alive(self) -> bool:
        """Whether requests are being answered."""
        return self._thread.is_alive()

    @property
    def draining(self) -> bool:
        """Whether devices are sent away because the service is about to stop."""
        return self._draining.is_set()

    def queue_depth(self) -> int:
        """Requests that wait for the next turn."""
        return len(self._inbox)

    def recover(self) -> None:
        """Come in among the replicas and take what is free: what ran there is abandoned, and tried again."""
        now = self._clock()
        self._membership.announce(now)
        self._poll(now)
        self._next_count = now + _COUNT_S

    def start(self) -> None:
        """Recover, then answer requests until `stop`."""
        self.recover()
        self._thread.start()

    def drain(self) -> None:
        """Send waiting and arriving devices away, and give back populations that are idle; reports are still taken."""
        self._draining.set()

    def stop(self) -> None:
        """Drain, answer what is queued, give everything back, and end the thread."""
        self.drain()
        self._stopping.set()
        self._thread.join()

    def submit(self, request: Request[T]) -> Future[T]:
        """Queue a request. Raises Unavailable when too many wait already, or nobody answers any more."""
        try:
            if self._stopping.is_set():
                raise queue.Full
            return self._inbox.put(request)
        except queue.Full as error:
            self.metrics.shed.labels("queue").inc()
            raise Unavailable("too many requests are waiting, or the service is stopping; come back later") from error

    def turn_away(self, request: Arrive) -> Rejected | None:
        """Reject a check-in for which there is surely nothing, from any thread, at once; None if it must be queued."""
        return self._check_ins.turn_away(request, self._clock())

    def fetched(self, device: str, sha256: str) -> None:
        """Note, from any thread, that a device was given a blob."""
        self._fetched.append((device, sha256))

    def turn(self, inbox: Sequence[Submission]) -> None:
        """Do everything that is due now, and answer `inbox`."""
        now = self._clock()
        self._check_ins.closed = self._draining.is_set()
        self._look(inbox, now)
        while self._fetched:
            self._sessions.fetched(*self._fetched.popleft())
        for submission in inbox:
            self._answer_from_memory(submission, now)
        # Not while a transaction must be tried again: what it would lose is lost with the next one that is written.
        lost = self._lost(now) if now >= self._next_try else {}
        self._secure.advance(now)
        durable = [(one.request, one.future) for one in inbox if isinstance(one.request, Report | GiveUp)]
        if self._in_doubt and (durable or now >= self._next_try):
            self._clear_doubt(now)
        due = self._due(now) if now >= self._next_try else []
        if durable or due or lost or (now >= max(self._next_count, self._next_try) and self._session_counts.any()):
            self._commit(durable, due, now, lost)
        if now >= self._next_try:
            self._close_rounds(now)
            self._observer.publish(self._membership, self._jobs, self._underway, now)
        self._check_ins.dismiss(now)
        if self._check_ins.closed:
            self.presence.dismiss()
            stopping = Unavailable("the coordinator is stopping, and abandons the secure rounds that run")
            self._secure.dismiss(stopping, {round_.id for round_ in self._underway})
        self.metrics.waiting.set(self._sessions.count())

    # --- the thread

    def _loop(self) -> None:
        while not self._stopping.is_set() or self._inbox:
            inbox = self._inbox.take(_BATCH, min(_TICK_S, max(0.0, self._next_poll - self._clock())))
            try:
                with self.metrics.turns.time():
                    self.turn(inbox)
            except Exception:
                # A bug, or a database that cannot even be read: the thread must outlive it, and nobody may hang.
                _LOG.exception("a turn failed")
                for submission in inbox:
                    settle(submission.future, Unavailable("the coordinator failed; nothing was counted"))
                time.sleep(_TICK_S)
        self._check_ins.closed = True
        now = self._clock()
        self._forget(self._membership.held, now)
        self._commit((), (), now, {})
        try:
            self._membership.leave()
        except Exception as error:
            _LOG.error("the leases could not be given back; others take over when they have run out: %s", error)

    # --- memory alone

    def _look(self, inbox: Sequence[Submission], now: float) -> None:
        """Look around when it is time, or at once when a device asks for a population that was made since."""
        try:
            if now >= self._next_poll or self._is_new(inbox):
                self._poll(now)
        except Exception:
            # What memory alone can answer goes on, and nothing is written without the leases.
            _LOG.exception("the database could not be looked at")
            self._next_poll = now + _POLL_S

    def _is_new(self, inbox: Sequence[Submission]) -> bool:
        # One look-up, however many ask: what no operator has made must cost hardly anything.
        asked = {one.request.population for one in inbox if isinstance(one.request, Arrive)}
        unknown = asked - self._check_ins.populations
        if not unknown:
            return False
        with self._store.database.reading() as records:
            return not unknown.isdisjoint(records.populations())

    def _poll(self, now: float) -> None:
        if self._draining.is_set():
            self._membership.drain()
        membership = self._membership
        idle = membership.held - {round_.job.task.settings.population for round_ in self._underway}
        with self._store.database.reading() as records:
            # Before leases are taken: a population that is made meanwhile is not known yet, rather than not driven.
            populations = records.populations()
        self._forget(membership.refresh(now, idle), now)
        with self._store.database.reading() as records:
            tasks = records.tasks(TaskState.ACTIVE, TaskState.PAUSED)
            driven = [task for task in tasks if task.settings.population in membership.held]
            self._participation.learn(records, driven, now)
        jobs = [job for task in driven if (job := load_job(membership, task)) is not None]
        self._jobs = {job.task.id: job.paused() if job.population in membership.leaving else job for job in jobs}
        self._next_poll = now + _POLL_S
        self._secure.forget(now)
        self._check_ins.learn(populations, membership.held, self._jobs.values(), self._underway, now)
        self.metrics.populations.set(len(membership.held))

    def _lost(self, now: float) -> Lost:
        """Assignments whose devices are not heard of any more, by round; none while devices are sent away."""
        lost: Lost = {} if self._check_ins.closed else self.presence.lost()
        for assignment in chain.from_iterable(lost.values()):
            self._secure.lose(assignment, now)
        return lost

    def _answer_from_memory(self, submission: Submission, now: float) -> None:
        future = submission.future
        try:
            match submission.request:
                case Arrive() as request:
                    settle(future, self._check_ins.arrive(request, now))
                case Wait() as request:
                    self._check_ins.wait(request, future, now)
                case HangUp() as request:
                    self._check_ins.hang_up(request, now)
                    settle(future, None)
                case Say(assignment) as request:
                    self._secure.of(assignment).say(request, now)
                    settle(future, None)
                case Hear(assignment) as request:
                    self._secure.of(assignment).hear(request, future, now)
                case GiveUp(assignment):
                    # To stop waiting for it is right whether or not the row can be written.
                    self._secure.leave(assignment)
        except Refusal as refusal:
            settle(future, refusal)

    # --- rows, then memory

    def _due(self, now: float) -> list[str]:
        """Tasks whose rounds must open, move or end; least recently served first."""
        tasks = self._jobs.keys() | {round_.job.task.id for round_ in self._underway}
        due = [task for task in tasks if self._selector.due(task, self._jobs.get(task), self._underway, now)]
        return sorted(due, key=lambda task: (self._last_round.get(task, 0), task))

    def _clear_doubt(self, now: float) -> None:
        """After a transaction failed: go on with the rounds that the store has as memory has them, and no others.

        A connection that breaks while a transaction is committed leaves open whether it was.
        """
        known = {round_.id: round_.value for round_ in self._underway}
        try:
            with self._membership.writing() as records:
                abandoned, go_on = records.abandon_unfinished_rounds(self._membership.held, "driver-lost", known)
                self._participation.forget()
                self._participation.learn(records, [job.task for job in self._jobs.values()], now)
        except Exception as error:
            self._fail(error, now)
            return
        self._in_doubt = False
        self._replace_rounds(self._underway.only(go_on), now)
        if abandoned:
            _LOG.warning("abandoned %d rounds that a failed transaction left in doubt", abandoned)

    def _fail(self, error: Exception, now: float) -> None:
        if isinstance(error, LeaseLost):
            # Nothing was written, and that is certain.
            self._membership.drop(error.populations)
            self._forget(error.populations, now)
            return
        _LOG.error("a transaction failed: %s", error)
        self._in_doubt, self._next_try = True, now + _RETRY_S

    def _commit(self, durable: Sequence[Durable], due: Sequence[str], now: float, lost: Lost) -> None:
        counts = self._session_counts.take()
        try:
            if self._in_doubt:
                raise StoreConflict("it is not known yet whether the last transaction was done")
            with self.metrics.transactions.time(), self._membership.writing() as records:
                transaction = Transaction(records, self._selector, self._underway, now)
                outcomes = transaction.take([request for request, _ in durable])
                transaction.lose(lost)
                for task in due:
                    transaction.advance(task, self._jobs.get(task))
                records.sessions.add(counts)
                for name in transaction.steps:
                    reach(f"{name}.before-commit")
            for name in transaction.steps:
                reach(f"{name}.after-commit")
        except Exception as error:
            self._session_counts.put_back(counts)
            # Memory has not been touched. The transaction was undone, as a rule; the next one finds out.
            self._fail(error, now)
            outcomes = [Unavailable("the coordinator could not store this; send it again later") for _ in durable]
        else:
            self._next_try, self._next_count = now, now + _COUNT_S
            self._adopt(transaction, now)
            self.presence.forget(chain.from_iterable(lost.values()))
        for (_, future), outcome in zip(durable, outcomes, strict=True):
            settle(future, outcome)

    def _forget(self, populations: frozenset[str], now: float) -> None:
        """Forget populations that this process drives no more: their sessions, rounds and sums."""
        lost = {round_.id for round_ in self._underway if round_.job.task.settings.population in populations}
        self._secure.dismiss(Unavailable("another replica took over, and abandons the round"), lost)
        self._replace_rounds(self._underway.only({round_.id for round_ in self._underway} - lost), now)
        self._jobs = {id_: job for id_, job in self._jobs.items() if job.population not in populations}
        self._check_ins.forget(populations, now)

    def _adopt(self, transaction: Transaction, now: float) -> None:
        for before, value in transaction.moved:
            self.metrics.round_moved(before.value, value, now - before.entered_at, now - before.opened_at)
        for reason in transaction.aborts:
            self.metrics.aborts.labels(reason).inc()
        for round_id, reports in transaction.folds.items():
            if round_id not in self._sums:
                self._sums[round_id] = ReportSum(reports[0].size)
            self._sums[round_id].add(*reports)
        self._adoption.let_go(transaction)
        self._replace_rounds(transaction.underway, now)
        self._adoption.seat(transaction, now)
        turned_away = [session for session in transaction.turned_away if session.id not in transaction.seated]
        self._check_ins.send_away(turned_away, "not-selected", now)

    def _replace_rounds(self, underway: Underway, now: float) -> None:
        live = {round_.id for round_ in underway}
        for task, ended in self._underway.running.items():
            if ended.id not in live:
                self._sums.pop(ended.id, None)
                self._sessions.forget_assigned(task, "not needed")
                self._participation.end(task, now, committed=False)
                if ended.value.assigned:
                    self._steering.ended(ended.job, now)
        self._underway = underway
        self._secure.adopt(underway.running.values(), now)
        self.presence.forget_all_but({round_.id for round_ in underway if round_.reporting})
        self._last_round |= {task: round_.id for task, round_ in underway.running.items()}

    def _close_rounds(self, now: float) -> None:
        for task, running in list(self._underway.running.items()):
            if running.value.state is not RoundState.AGGREGATING or task not in self._underway.running:
                continue
            try:
                value, pause_s = commit_round(
                    self._membership, running, self._sums[running.id], now, self.metrics.round_steps
                )
            except Exception as error:
                # The sum is still here: the round stays in AGGREGATING and is closed when the disk allows it.
                self._fail(error, now)
                continue
            self.metrics.round_moved(running.value, value, now - running.entered_at, now - running.opened_at)
            after = self._underway.copy()
            del after.running[task]
            after.not_before[task] = now + pause_s
            self._participation.end(task, now, committed=value.state is RoundState.COMMITTED)
            self._replace_rounds(after, now)
            self._next_poll = now
