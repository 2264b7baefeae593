"""Closing of rounds that have their reports."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set as AbstractSet
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.driver.memory.in_memory_state import Memory
from coordinator.driver.memory.open_rounds import OpenRound
from coordinator.driver.replica_membership import Membership
from coordinator.driver.writing.commit_round import abandon_round, commit_round
from coordinator.driver.writing.write_transactions import Writer
from coordinator.metrics import Metrics
from coordinator.rules.buffers import refusal
from coordinator.rules.entities import AssignedDevice
from coordinator.rules.rounds import Abandon
from coordinator.rules.states import AssignmentState, RoundState
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
