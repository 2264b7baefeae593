"""What a transaction did to devices, taken over into memory once it is committed. The driver's thread alone."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.driver.participation import ParticipationLimit
from coordinator.driver.presence import Presence
from coordinator.driver.sessions import Sessions
from coordinator.driver.steering import Steering
from coordinator.driver.transaction import Transaction
from coordinator.rules.rounds import RoundState


@dataclass(frozen=True, slots=True)
class Adoption:
    """Where devices are remembered: their sessions, who took part, who is there, when they come back."""

    sessions: Sessions
    participation: ParticipationLimit
    presence: Presence
    steering: Steering

    def let_go(self, transaction: Transaction) -> None:
        """Devices whose assignments have ended are free again."""
        for one in transaction.ended:
            self.sessions.let_go(one.population, one.device, one.how)
        self.presence.forget(one.assignment for one in transaction.ended)
        for task, device in transaction.left:
            self.participation.leave(task, device)
        for before, value in transaction.moved:
            if before.reporting and value.state is not RoundState.REPORTING:
                self.sessions.forget_assigned(before.job.task.id, "expired" if value.expired else "not needed")

    def seat(self, transaction: Transaction, now: float) -> None:
        """Devices that were drawn have their assignments, and are expected to be there from now on."""
        for secure, slots in transaction.joined:
            secure.join(slots)
        for session, assignment, until in transaction.seated.values():
            self.presence.expect(transaction.underway.running[assignment.task].id, assignment)
            self.sessions.assign(session, assignment, until)
        for task, devices in transaction.cohorts.items():
            running = transaction.underway.running[task]
            self.participation.seat(task, devices, now)
            if not running.value.replaced:
                self.steering.drawn(running.job, now)
