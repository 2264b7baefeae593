"""Closing of rounds that have their reports."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.driver.commit_round import commit_round
from coordinator.driver.in_memory_state import Memory
from coordinator.driver.replica_membership import Membership
from coordinator.driver.write_transactions import Writer
from coordinator.metrics import Metrics
from coordinator.rules.rounds import RoundState
from fedcore.signing import SigningKey


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
        for task_id, running in list(self.memory.rounds.running.items()):
            if running.value.state is not RoundState.AGGREGATING or task_id not in self.memory.rounds.running:
                continue
            try:
                total = self.memory.sums[running.id]
                steps = self.metrics.round_steps
                outcome = commit_round(self.membership, self.lineage, running, total, now, steps)
            except Exception as error:
                # The sum is still here: the round stays in AGGREGATING and is closed when the disk allows it.
                self.writer.fail(error, now)
                continue
            value = outcome.value
            self.metrics.round_moved(running.value, value, now - running.entered_at, now - running.opened_at)
            after = self.memory.rounds.copy()
            del after.running[task_id]
            after.not_before[task_id] = now + outcome.pause_s
            if value.state is RoundState.COMMITTED:
                after.left_out.pop(task_id, None)
            else:
                after.leave_out(task_id, outcome.left_out)
            self.memory.participation.end(task_id, now, committed=value.state is RoundState.COMMITTED)
            self.memory.replace_rounds(after, now)
            closed = True
        return closed
