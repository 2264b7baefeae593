"""Adoption of a committed transaction: its effects on devices, applied to memory by the driver's thread."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.driver.memory.in_memory_state import Memory
from coordinator.driver.writing.effects import (
    AssignmentEnded,
    DevicesDrawn,
    DevicesTurnedAway,
    Effect,
    ReportsCounted,
    RoundMoved,
    SharedReportsCounted,
    SumHandedOver,
)
from coordinator.driver.writing.transaction import Transaction
from coordinator.metrics import Metrics
from coordinator.rules.states import AssignmentState


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
            if isinstance(effect, DevicesTurnedAway):
                left = [session for session in effect.sessions if session.assignment is None]
                self.memory.check_ins.send_away(left, "not-selected", now)

    def _end(self, effect: Effect, now: float) -> None:
        memory = self.memory
        match effect:
            case RoundMoved(before, after):
                self.metrics.round_moved(before.value, after, now - before.entered_at, now - before.opened_at)
                if before.reporting and after.closed:
                    late = after.timed_out and not before.buffered
                    memory.sessions.end_assignments(before.task.id, "expired" if late else "not needed")
            case ReportsCounted(round_, vectors):
                into = memory.sum_of(round_)
                into.reports.add(*vectors)
                into.count += len(vectors)
            case SharedReportsCounted(shared, counted, vectors):
                memory.shared.add(shared, counted, vectors)
            case SumHandedOver(round_, replica, count, total):
                into = memory.sum_of(round_)
                if replica not in into.handed:
                    into.handed.add(replica)
                    into.reports.add(total)
                    into.count += count
            case AssignmentEnded():
                self._end_assignment(effect)

    def _end_assignment(self, ended: AssignmentEnded) -> None:
        memory, how = self.memory, str(ended.state)
        if ended.state is AssignmentState.ABORTED:
            how = f"aborted: {ended.reason}"
            self.metrics.aborts.labels(ended.reason).inc()
        memory.sessions.end_assignment(ended.population, ended.device, ended.assignment, how)
        memory.presence.forget([ended.assignment])
        if ended.state in (AssignmentState.ABORTED, AssignmentState.LOST):
            memory.participation.leave(ended.task, ended.device)

    def _begin(self, effect: Effect, now: float) -> None:
        """Devices that were drawn have their assignments, and are expected to be present from now on."""
        if not isinstance(effect, DevicesDrawn):
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
