"""The driver: the one thread that changes state. Requests queue up; each turn commits what has come, all at once.

A turn is: look for changed tasks, answer what memory alone can answer, commit reports and round changes in one
transaction, only then adopt them in memory and answer, close rounds that have their reports, dismiss who waited enough.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from coordinator.aggregation import ReportSum
from coordinator.closing import close_round
from coordinator.errors import NoLongerNeeded, Refusal, Unavailable, UnknownBlob, UnknownPopulation
from coordinator.ledger import Draft, Job, Running, next_event
from coordinator.pool import Pool, Session
from coordinator.rounds import RoundState, TaskState, step
from coordinator.secure import SecureRound, SecureRounds
from coordinator.selection import Capabilities, Needs, formats_wanted
from coordinator.store.rows import Task
from coordinator.submissions import (
    Arrive,
    GiveUp,
    HangUp,
    Hear,
    Report,
    Request,
    Say,
    Submission,
    Wait,
    settle,
)
from coordinator.tasks import CoordinatorStore
from fedcore.errors import FedcoreError
from fedcore.wire.messages import Accepted, CheckInAnswer, Rejected, RejectionReason, RetryWindow

T = TypeVar("T")
Durable: TypeAlias = tuple[Report | GiveUp, Future[Any]]
_LOG = logging.getLogger(__name__)
_TICK_S = 0.05
_POLL_S = 0.25
_RETRY_S = 1.0
_BATCH = 512
_LINGER_S = 60.0
"""How long the messages of a secure aggregation that is over can still be had."""


class Driver:
    """Runs the rounds of every task in a store. One per store: a second one would abandon the rounds of the first."""

    def __init__(
        self,
        store: CoordinatorStore,
        secagg: SecureRounds,
        retry: RetryWindow,
        queue_limit: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._secagg = secagg
        self._retry = retry
        self._clock = clock
        self._queue: queue.Queue[Submission] = queue.Queue(queue_limit)
        self._thread = threading.Thread(target=self._loop, name="driver")
        self._draining = threading.Event()
        self._stopping = threading.Event()
        self._pool = Pool()
        self._populations: frozenset[str] = frozenset()
        self._jobs: dict[str, Job] = {}
        self._running: dict[str, Running] = {}
        self._sums: dict[int, ReportSum] = {}
        self._secure: dict[int, SecureRound] = {}
        self._last_round: dict[str, int] = {}
        self._next_poll = self._next_try = -float("inf")

    @property
    def alive(self) -> bool:
        """Whether requests are being answered."""
        return self._thread.is_alive()

    def recover(self) -> None:
        """Abandon what an earlier process left running: its sums are gone. The rounds are tried again."""
        with self._store.database.writing() as records:
            abandoned = records.abandon_unfinished_rounds("restart")
        if abandoned:
            _LOG.warning("abandoned %d rounds that a restart interrupted", abandoned)

    def start(self) -> None:
        """Recover, then answer requests until `stop`."""
        self.recover()
        self._thread.start()

    def drain(self) -> None:
        """Send waiting and arriving devices away; reports are still taken."""
        self._draining.set()

    def stop(self) -> None:
        """Drain, answer what is queued, and end the thread."""
        self.drain()
        self._stopping.set()
        self._thread.join()

    def submit(self, request: Request[T]) -> Future[T]:
        """Queue a request. Raises Unavailable when too many wait already, or nobody answers any more."""
        future: Future[T] = Future()
        try:
            if self._stopping.is_set():
                raise queue.Full
            self._queue.put_nowait(Submission(request, future))
        except queue.Full as error:
            raise Unavailable("too many requests are waiting, or the service is stopping; come back later") from error
        return future

    def turn(self, inbox: Sequence[Submission]) -> None:
        """Do everything that is due now, and answer `inbox`."""
        now = self._clock()
        if now >= self._next_poll:
            self._poll(now)
        for submission in inbox:
            self._answer_from_memory(submission, now)
        for secure in self._secure.values():
            secure.advance(now)
        durable = [(s.request, s.future) for s in inbox if isinstance(s.request, Report | GiveUp)]
        due = self._due(now) if now >= self._next_try else []
        if durable or due:
            self._commit(durable, due, now)
        if now >= self._next_try:
            self._close_rounds(now)
        self._reject(self._pool.overdue(now), "not-selected")
        if self._draining.is_set():
            self._reject(list(self._pool.waiting()), "shutting-down")
            for secure in self._secure.values():
                secure.dismiss(Unavailable("the coordinator is stopping, and abandons the secure rounds that run"))

    # --- the thread

    def _loop(self) -> None:
        while not (self._stopping.is_set() and self._queue.empty()):
            inbox = self._take()
            try:
                self.turn(inbox)
            except Exception:
                # A bug, or a database that cannot even be read: the thread must outlive it, and nobody may hang.
                _LOG.exception("a turn failed")
                for submission in inbox:
                    settle(submission.future, Unavailable("the coordinator failed; nothing was counted"))
                time.sleep(_TICK_S)
        self._reject(list(self._pool.waiting()), "shutting-down")

    def _take(self) -> list[Submission]:
        inbox: list[Submission] = []
        try:
            wait_s = min(_TICK_S, max(0.0, self._next_poll - self._clock()))
            inbox.append(self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait())
            while len(inbox) < _BATCH:
                inbox.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return [submission for submission in inbox if submission.future.set_running_or_notify_cancel()]

    # --- memory alone

    def _poll(self, now: float) -> None:
        with self._store.database.reading() as records:
            self._populations = records.populations()
            tasks = records.tasks(TaskState.ACTIVE, TaskState.PAUSED)
        self._jobs = {task.id: job for task in tasks if (job := self._job(task)) is not None}
        self._next_poll = now + _POLL_S
        over = [
            id_ for id_, one in self._secure.items() if one.ended_at is not None and one.ended_at + _LINGER_S <= now
        ]
        for round_id in over:
            del self._secure[round_id]
        self._reject([session for session in self._pool.waiting() if not self._has_offer(session)], "no-task")

    def _job(self, task: Task) -> Job | None:
        """A task ready to run; None, and the task failed, when its plan is gone: one task must not stop the others."""
        try:
            return Job.of(task, self._store.plan(task.plan_sha256))
        except (UnknownBlob, FedcoreError) as error:
            _LOG.error("task %s failed: its plan cannot be read: %s", task.id, error)
            with self._store.database.writing() as records:
                records.move_task(task, TaskState.FAILED, "plan-unreadable", str(error))
            return None

    def _answer_from_memory(self, submission: Submission, now: float) -> None:
        try:
            match submission.request:
                case Arrive(_, _) as request:
                    settle(submission.future, self._arrive(request, now))
                case Wait(session, wait_s):
                    self._pool.wait(session, submission.future, now + wait_s, now)
                case HangUp(session):
                    self._pool.hang_up(session, now)
                    settle(submission.future, None)
                case Say(assignment) as request:
                    self._secure_round(assignment).say(request, now)
                    settle(submission.future, None)
                case Hear(assignment) as request:
                    self._secure_round(assignment).hear(request, submission.future, now)
                case GiveUp(assignment):
                    # To stop waiting for it is right whether or not the row can be written.
                    with suppress(NoLongerNeeded):
                        self._secure_round(assignment).leave(assignment)
        except Refusal as refusal:
            settle(submission.future, refusal)

    def _arrive(self, request: Arrive, now: float) -> CheckInAnswer:
        if request.population not in self._populations:
            self._poll(now)
        if request.population not in self._populations:
            raise UnknownPopulation(f"no population is called {request.population!r}")
        device = Capabilities(frozenset(request.message.formats), request.message.examples)
        offers = [job for job in self._jobs.values() if job.task.settings.population == request.population]
        offers = [job for job in offers if job.task.state is TaskState.ACTIVE]
        if self._draining.is_set():
            return self._rejected("shutting-down")
        if not any(job.needs.met_by(device) for job in offers):
            return self._without_offer([job.needs for job in offers], device)
        session, older = self._pool.enter(request.population, request.message.device, device, now)
        for visit in older:
            self._pool.reject(visit, self._rejected("superseded"))
        return Accepted(session)

    def _without_offer(self, offers: Sequence[Needs], device: Capabilities) -> Rejected:
        formats = formats_wanted(offers, device)
        if formats:
            return Rejected("unsupported-format", self._retry, tuple(sorted(formats)))
        return self._rejected("not-eligible" if offers else "no-task")

    def _secure_round(self, assignment: str) -> SecureRound:
        for secure in self._secure.values():
            if assignment in secure:
                return secure
        raise NoLongerNeeded("the assignment has no secure aggregation, or it is over")

    def _has_offer(self, session: Session) -> bool:
        return any(
            (job.task.state is TaskState.ACTIVE or job.task.id in self._running)
            and job.task.settings.population == session.population
            and job.needs.met_by(session.capabilities)
            for job in self._jobs.values()
        )

    def _reject(self, sessions: Sequence[Session], reason: RejectionReason) -> None:
        for session in sessions:
            self._pool.reject(session, self._rejected(reason))

    def _rejected(self, reason: RejectionReason) -> Rejected:
        return Rejected(reason, self._retry)

    # --- rows, then memory

    def _due(self, now: float) -> list[tuple[Job, bool]]:
        """Jobs whose round must open or move, and whether the task was cancelled; least recently served first."""
        cancelled = [running.job for task, running in self._running.items() if task not in self._jobs]
        candidates = [(job, False) for job in self._jobs.values()] + [(job, True) for job in cancelled]
        due = [(job, ended) for job, ended in candidates if self._is_due(job, ended, now)]
        return sorted(due, key=lambda item: self._last_round.get(item[0].task.id, 0))

    def _is_due(self, job: Job, cancelled: bool, now: float) -> bool:
        running = self._running.get(job.task.id)
        if running is None:
            return job.task.state is TaskState.ACTIVE and self._count_eligible(job) > 0
        eligible = self._count_eligible(job) if running.value.state is RoundState.SELECTING else 0
        return step(running.value, next_event(running, cancelled, eligible), now)[0] != running.value

    def _count_eligible(self, job: Job) -> int:
        return len(self._pool.eligible(job.task.settings.population, job.needs))

    def _commit(self, durable: Sequence[Durable], due: Sequence[tuple[Job, bool]], now: float) -> None:
        try:
            with self._store.database.writing() as records:
                draft = Draft(records, self._secagg, self._running, self._pool, now)
                outcomes = [_attempt(draft, request) for request, _ in durable]
                for job, cancelled in due:
                    draft.advance(job, cancelled=cancelled)
        except Exception as error:
            # Whatever went wrong, the transaction is undone and the draft with it; memory has not been touched.
            _LOG.error("a transaction failed, nothing was counted: %s", error)
            self._next_try = now + _RETRY_S
            outcomes = [Unavailable("the coordinator could not store this; send it again later") for _ in durable]
        else:
            self._next_try = now
            self._adopt(draft, now)
        for (_, future), outcome in zip(durable, outcomes, strict=True):
            settle(future, outcome)

    def _adopt(self, draft: Draft, now: float) -> None:
        for round_id, report_L in draft.folds:
            if round_id not in self._sums:
                self._sums[round_id] = ReportSum(report_L.size)
            self._sums[round_id].add(report_L)
        self._replace_rounds(draft.running, now)
        for session, assignment, until in draft.seated.values():
            self._pool.assign(session, assignment, until)
        self._reject([session for session in draft.turned_away if session.id not in draft.seated], "not-selected")

    def _replace_rounds(self, running: dict[str, Running], now: float) -> None:
        live = {round_.id for round_ in running.values()}
        for task, ended in self._running.items():
            if ended.id not in live:
                self._sums.pop(ended.id, None)
                self._pool.forget_assigned(task)
        self._running = running
        self._replace_secure(now)
        self._last_round |= {task: round_.id for task, round_ in running.items()}

    def _replace_secure(self, now: float) -> None:
        """Take up the secure aggregations of new rounds, end those of rounds that report no more."""
        secure = {round_.id: round_.secure for round_ in self._running.values() if round_.secure}
        open_ = {round_.id for round_ in self._running.values() if round_.value.state is RoundState.REPORTING}
        self._secure |= secure
        for round_id, one in self._secure.items():
            if round_id not in open_:
                one.finish(now)

    def _close_rounds(self, now: float) -> None:
        for task, running in list(self._running.items()):
            if running.value.state is not RoundState.AGGREGATING:
                continue
            try:
                close_round(self._store, running, self._sums[running.id], now)
            except Exception as error:
                # The sum is still here: the round stays in AGGREGATING and is closed when the disk allows it.
                _LOG.error("round %d of task %s could not be closed yet: %s", running.number, task, error)
                self._next_try = now + _RETRY_S
                continue
            self._replace_rounds({other: value for other, value in self._running.items() if other != task}, now)
            self._next_poll = now


def _attempt(draft: Draft, request: Report | GiveUp) -> object:
    try:
        if isinstance(request, Report):
            return draft.report(request)
        draft.give_up(request)
    except Refusal as refusal:
        return refusal
    return None
