"""Writer: the transactions of a driver, their adoption into memory, and the closing of rounds with their reports."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence, Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from msgspec.structs import replace

from coordinator.commands import DurableCommand, settle
from coordinator.driver.memory.check_in import Memory
from coordinator.driver.memory.open_rounds import OpenRound, unreliable_devices
from coordinator.driver.memory.selector import Selector
from coordinator.driver.replica_membership import Membership
from coordinator.driver.writing import make_assignments
from coordinator.driver.writing.commit_round import abandon_round, commit_round
from coordinator.driver.writing.transaction import Transaction
from coordinator.errors import DatabaseLocked, LeaseLost, StoreConflict, Unavailable
from coordinator.failpoints import reach
from coordinator.monitoring import Metrics
from coordinator.rules.buffers import refusal
from coordinator.rules.entities import AssignedDevice
from coordinator.rules.rounds import Abandon
from coordinator.rules.states import AssignmentState, RoundState
from coordinator.store.database import STORE_FAILURES
from coordinator.store.records.rows import Counts, ModelCounts
from fedcore.signing import SigningKey


@dataclass(frozen=True, slots=True)
class EffectApplier:
    """Takes the effects of transactions over into `memory`. Only the driver's thread uses it."""

    memory: Memory
    metrics: Metrics

    def adopt(self, transaction: Transaction, now: float) -> None:
        """Apply ends first, then the rounds as they are now, then beginnings; send devices away last."""
        for effect in transaction.effects:
            self._end(effect, now)
        self.memory.replace_rounds(transaction.rounds, now)
        for effect in transaction.effects:
            self._begin(effect, now)
        for effect in transaction.effects:
            if isinstance(effect, make_assignments.DevicesTurnedAway):
                left = [session for session in effect.sessions if session.assignment is None]
                self.memory.check_ins.send_away(left, "not-selected", now)

    def _end(self, effect: make_assignments.Effect, now: float) -> None:
        memory = self.memory
        match effect:
            case make_assignments.RoundMoved(before, after):
                self.metrics.round_moved(before.value, after, now - before.entered_at, now - before.opened_at)
                if before.reporting and after.closed:
                    late = after.timed_out and not before.buffered
                    memory.sessions.end_assignments(before.task.id, "expired" if late else "not needed")
            case make_assignments.ReportsCounted(round_, vectors):
                into = memory.sum_of(round_)
                into.reports.add(*vectors)
                into.count += len(vectors)
            case make_assignments.SharedReportsCounted(shared, counted, vectors):
                memory.shared.add(shared, counted, vectors)
            case make_assignments.SumHandedOver(round_, replica, count, total):
                into = memory.sum_of(round_)
                if replica not in into.handed:
                    into.handed.add(replica)
                    into.reports.add(total)
                    into.count += count
            case make_assignments.AssignmentEnded():
                self._end_assignment(effect)

    def _end_assignment(self, ended: make_assignments.AssignmentEnded) -> None:
        memory, how = self.memory, str(ended.state)
        if ended.state is AssignmentState.ABORTED:
            how = f"aborted: {ended.reason}"
            self.metrics.aborts.labels(ended.reason).inc()
        memory.sessions.end_assignment(ended.population, ended.device, ended.assignment, how)
        memory.presence.forget([ended.assignment])
        if ended.state in (AssignmentState.ABORTED, AssignmentState.LOST):
            memory.participation.leave(ended.task, ended.device)

    def _begin(self, effect: make_assignments.Effect, now: float) -> None:
        """Devices that were drawn have their assignments, and are expected to be present from now on."""
        if not isinstance(effect, make_assignments.DevicesDrawn):
            return
        memory, round_ = self.memory, effect.round
        replacements = round_.value.replaced > 0
        if round_.secure is not None and replacements:
            round_.secure.join({assignment.assignment: assignment.slot for _, assignment in effect.assignments})
        for session, assignment in effect.assignments:
            memory.presence.expect(round_.id, assignment)
            memory.sessions.assign(session, assignment, effect.until)
        memory.participation.add(round_.task.id, [session.device for session, _ in effect.assignments], now)
        if not replacements:
            memory.steering.drawn(round_.task, len(effect.assignments), now)


_LOG = logging.getLogger(__name__)
_RETRY_S = 1.0
_LOCKED_RETRY_S, _LOCKED_S = 0.25, 10.0
"""While another transaction holds the database: from one try to the next, and how long reports wait for that."""
_DEFERRED_S = 10.0
"""How long reports wait for the next buffer to open."""
_COUNT_S = 60.0
"""How long counts wait for a transaction that happens anyway, before they get one of their own."""
_REST_S = 60.0
"""How long a task rests that could not be advanced for a reason of its own: one transaction is for all tasks."""

Lost: TypeAlias = Mapping[int, Sequence[str]]
"""Assignments whose devices are lost, by round."""
Waiting: TypeAlias = tuple[DurableCommand, Future[Any]]


class Writer:
    """Commits, and only then lets memory adopt. Only the driver's thread uses it.

    It waits for no lock, as check-ins are answered by the same thread: while another transaction holds the database,
    commands wait here, and everything else that is due waits too.

    A connection that breaks while a transaction is committed leaves open whether it was. Until that is known, nothing
    else is written: the transaction is *in doubt*.
    """

    def __init__(self, membership: Membership, memory: Memory, selector: Selector, metrics: Metrics) -> None:
        self._membership = membership
        self._memory = memory
        self._selector = selector
        self._metrics = metrics
        self._effects = EffectApplier(memory, metrics)
        self._next_try = self._next_count = -float("inf")
        self._in_doubt = False
        self._postponed: list[Waiting] = []
        self._postponed_since: float | None = None
        self._deferred: dict[Future[Any], float] = {}
        """Since when the answers to reports that wait are deferred."""
        self._resting: dict[str, float] = {}
        """Tasks that are not advanced before a time."""

    @property
    def waits(self) -> bool:
        """Whether commands wait for the next transaction."""
        return bool(self._postponed)

    def ready(self, now: float) -> bool:
        """Whether it is time to write, also after a transaction that failed."""
        return now >= self._next_try

    def start(self, now: float) -> None:
        """Begin to wait for counts of sessions."""
        self._next_count = now + _COUNT_S

    def write(self, durable: Sequence[Waiting], lost: Lost, now: float) -> None:
        """Write all that is due, and answer the commands that need a transaction."""
        if self._postponed:
            durable, self._postponed = [*self._postponed, *durable], []
            if not self.ready(now):
                self._postponed = durable
                return
        if self._in_doubt and (durable or self.ready(now)):
            self._clear_doubt(now)
        due = self._due(now) if self.ready(now) else []
        counted = self._memory.session_counts.any() or self._memory.model_counts.any()
        counts = counted and now >= max(self._next_count, self._next_try)
        if durable or due or lost or counts:
            self.commit(durable, due, lost, now)

    def commit(self, durable: Sequence[Waiting], due: Sequence[str], lost: Lost, now: float) -> None:
        """Do all of this in one transaction, and adopt it."""
        counts, versions = self._memory.session_counts.take(), self._memory.model_counts.take()
        try:
            if self._in_doubt:
                raise StoreConflict("it is not known yet whether the last transaction was done")
            with self._metrics.transactions.time(), self._membership.writing() as records:
                transaction = Transaction(records, self._selector, self._memory.rounds, self._memory.shared, now)
                outcomes = transaction.take([command for command, _ in durable])
                transaction.lose(lost)
                for task_id in due:
                    self._advance(transaction, task_id, now)
                records.sessions.add(counts)
                records.models.add_counts(versions)
                for name in transaction.durable_steps:
                    reach(f"{name}.before-commit")
            for name in transaction.durable_steps:
                reach(f"{name}.after-commit")
        except DatabaseLocked:
            self._put_back(counts, versions)
            self._postpone(durable, now)
            return
        except Exception as error:
            self._put_back(counts, versions)
            # Memory has not been touched. The transaction was undone, as a rule; the next one finds out.
            self.fail(error, now)
            outcomes = [Unavailable("the coordinator could not store this; send it again later") for _ in durable]
        else:
            self._next_try, self._next_count = now, now + _COUNT_S
            self._effects.adopt(transaction, now)
            self._memory.presence.forget(chain.from_iterable(lost.values()))
        self._postponed_since = None
        self._settle(durable, outcomes, now)

    def _settle(self, durable: Sequence[Waiting], outcomes: Sequence[object], now: float) -> None:
        """Answer commands. Those whose answers are deferred wait for the next transaction, but not for ever."""
        before, self._deferred = self._deferred, {}
        for waiting, outcome in zip(durable, outcomes, strict=True):
            future = waiting[1]
            if outcome is not make_assignments.DEFERRED:
                settle(future, outcome)
            elif now < (since := before.get(future, now)) + _DEFERRED_S:
                self._postponed.append(waiting)
                self._deferred[future] = since
            else:
                settle(future, Unavailable("the next model cannot be made now; send the report again later"))

    def _put_back(self, counts: Counts, versions: ModelCounts) -> None:
        self._memory.session_counts.put_back(counts)
        self._memory.model_counts.put_back(versions)

    def _advance(self, transaction: Transaction, task_id: str, now: float) -> None:
        try:
            transaction.advance(task_id, self._memory.tasks.get(task_id))
        except STORE_FAILURES:
            raise
        except Exception:  # a bug, or a bundle that nobody thought of
            _LOG.exception("task %s cannot go on; it is tried again in %.0f s, and others go on", task_id, _REST_S)
            self._resting[task_id] = now + _REST_S
            raise

    def fail(self, error: Exception, now: float) -> None:
        """Take note of a transaction that failed: it is in doubt, unless the lease was lost or nothing was begun."""
        if isinstance(error, DatabaseLocked):
            # Commands that wait already go on waiting.
            self._next_try = now + _LOCKED_RETRY_S
            return
        if isinstance(error, LeaseLost):
            # Nothing was written, and that is certain.
            self._membership.drop(error.populations)
            self._memory.drop_populations(error.populations, now)
            return
        _LOG.error("a transaction failed: %s", error)
        self._in_doubt, self._next_try = True, now + _RETRY_S

    def _postpone(self, durable: Sequence[Waiting], now: float) -> None:
        """Try again soon, and let commands wait until then, for as long as their devices should."""
        self._next_try = now + _LOCKED_RETRY_S
        if self._postponed_since is None and durable:
            _LOG.warning("another transaction holds the database: %d reports wait for it", len(durable))
            self._postponed_since = now
        if self._postponed_since is None or now < self._postponed_since + _LOCKED_S:
            self._postponed = list(durable)
            return
        self._postponed_since = None
        for _, future in durable:
            settle(future, Unavailable("the database has been busy for a while; send it again later"))

    def _due(self, now: float) -> list[str]:
        """Tasks whose rounds must open, move or end, unless they rest; least recently served first."""
        memory = self._memory
        self._resting = {task_id: until for task_id, until in self._resting.items() if until > now}
        candidates = (memory.tasks.keys() | {round_.task.id for round_ in memory.rounds}) - self._resting.keys()
        return memory.least_recently_served(
            id_ for id_ in candidates if self._selector.due(id_, memory.tasks.get(id_), memory.rounds, now)
        )

    def _clear_doubt(self, now: float) -> None:
        """Go on with the rounds that the store has as memory has them, and abandon the others."""
        memory = self._memory
        in_memory = {round_.id: round_.value for round_ in memory.rounds}
        try:
            with self._membership.writing() as records:
                abandoned, go_on = records.abandon_unfinished_rounds(self._membership.held, "driver-lost", in_memory)
                memory.participation.forget()
                memory.participation.learn(records, [task.record for task in memory.tasks.values()], now)
                memory.participation.leave_out(memory.rounds.left_out)
                for task in memory.tasks.values():
                    memory.rounds.unreliable[task.id] = unreliable_devices(records, task.record)
        except Exception as error:
            self.fail(error, now)
            return
        self._in_doubt = False
        memory.replace_rounds(memory.rounds.only(go_on), now)
        if abandoned:
            _LOG.warning("abandoned %d rounds that a failed transaction left in doubt", abandoned)


# Closing of rounds that have their reports.


@dataclass(frozen=True, slots=True)
class RoundCloser:
    """Commits rounds in AGGREGATING, each in a transaction of its own. Only the driver's thread uses it."""

    membership: Membership
    memory: Memory
    writer: Writer
    metrics: Metrics
    lineage: SigningKey

    def close_rounds(self, now: float) -> bool:
        """Close every round that has its reports. Whether any was closed, so that its task must be read again."""
        closed = False
        for task_id, opened in list(self.memory.rounds.running.items()):
            if task_id not in self.memory.rounds.running:
                continue
            # As it stands now: no round follows when it was paused, or its population is about to be given back.
            running = replace(opened, task=self.memory.tasks.get(task_id, opened.task.paused()))
            try:
                if not self._may_end(opened, now):
                    continue
                collected = self.memory.sum_of(running)
                if self._has_all(running):
                    observed = self.metrics.round_steps
                    outcome = commit_round(self.membership, self.lineage, running, collected, now, observed)
                elif self._lost_a_share(running, now) or now >= running.entered_at + self.membership.lease_s:
                    outcome = abandon_round(self.membership, running, Abandon("replica-lost"), now)
                else:
                    continue
            except Exception as error:
                # The sum is still here: the round stays in AGGREGATING and is closed when the disk allows it.
                self.writer.fail(error, now)
                continue
            value = outcome.value
            self.metrics.round_moved(running.value, value, now - running.entered_at, now - running.opened_at)
            after = self.memory.rounds.copy()
            del after.running[task_id]
            if outcome.successor is not None:
                after.running[task_id] = outcome.successor
            after.not_before[task_id] = now + outcome.pause_s
            if value.state is RoundState.COMMITTED:
                after.commit(task_id)
            else:
                after.leave_out(task_id, outcome.left_out)
            self._end_stale(running, outcome.too_stale)
            if outcome.at_work is not None:
                self._end_all_but(running, outcome.at_work)
            going_on = set(self.memory.sessions.at_work(task_id).values()) if outcome.successor else frozenset()
            committed = value.state is RoundState.COMMITTED
            self.memory.participation.end(task_id, now, committed=committed, going_on=going_on)
            self.memory.replace_rounds(after, now)
            closed = True
        return closed

    def _may_end(self, round_: OpenRound, now: float) -> bool:
        """Whether a round has its reports, or lost some of them."""
        return round_.value.state is RoundState.AGGREGATING or (round_.reporting and self._lost_a_share(round_, now))

    def _has_all(self, round_: OpenRound) -> bool:
        """Whether all reports of a round that have a receipt are in its sum: other replicas may still hand theirs over.

        No other receipt can come, since the assignments have ended.
        """
        if round_.value.state is not RoundState.AGGREGATING or not round_.shared:
            return not round_.reporting
        return self._receipts(round_) == self.memory.sum_of(round_).count == round_.value.reported

    def _lost_a_share(self, round_: OpenRound, now: float) -> bool:
        """Whether a replica that took reports of a round, and has their sum, was not heard of for the lease time.

        It may have died before it told of any: then there are receipts of devices that seem to be lost.
        """
        heard_of, oldest = self.memory.heard_of, now - self.membership.lease_s
        silent = {replica for replica in round_.told if heard_of.get(replica, now) <= oldest}
        if silent and not silent <= self.memory.sum_of(round_).handed:
            return True
        if round_.uncertain_since > oldest:
            return False
        if self._receipts(round_) > round_.value.reported:
            return True
        self.memory.rounds.put(replace(round_, uncertain_since=math.inf))
        return False

    def _receipts(self, round_: OpenRound) -> int:
        with self.membership.store.database.reading() as records:
            return records.attempts.receipts(round_.id)

    def _end_all_but(self, round_: OpenRound, at_work: AbstractSet[str]) -> None:
        """Take for done whoever is not at work any more: another replica has the report, and did not tell of it."""
        for assignment, device in self.memory.sessions.at_work(round_.task.id).items():
            if assignment not in at_work:
                self.memory.sessions.end_assignment(round_.task.population, device, assignment, "reported")
                self.memory.presence.forget([assignment])

    def _end_stale(self, round_: OpenRound, too_stale: Sequence[AssignedDevice]) -> None:
        """Tell the devices whose reports are refused from now on."""
        for assigned in too_stale:
            population, device = round_.task.population, assigned.device
            self.memory.sessions.end_assignment(population, device, assigned.id, "too stale")
        self.memory.presence.forget([assigned.id for assigned in too_stale], refusal(AssignmentState.TOO_STALE))
