"""What a transaction did to devices, taken over into memory once it is committed. The driver's thread alone."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.ledger import Draft
from coordinator.participation import Apart
from coordinator.pool import Pool
from coordinator.presence import Presence
from coordinator.rounds import RoundState
from coordinator.steering import Steering


@dataclass(frozen=True, slots=True)
class Adoption:
    """Where devices are remembered: their sessions, who took part, who is there, when they come back."""

    pool: Pool
    apart: Apart
    presence: Presence
    steering: Steering

    def let_go(self, draft: Draft) -> None:
        """Devices whose assignments have ended are free again."""
        for one in draft.ended:
            self.pool.let_go(one.population, one.device, one.how)
        self.presence.forget(one.assignment for one in draft.ended)
        for task, device in draft.left:
            self.apart.leave(task, device)
        for before, value in draft.moved:
            if before.reporting and value.state is not RoundState.REPORTING:
                self.pool.forget_assigned(before.job.task.id, "expired" if value.expired else "not needed")

    def seat(self, draft: Draft, now: float) -> None:
        """Devices that were drawn have their assignments, and are expected to be there from now on."""
        for secure, slots in draft.joined:
            secure.join(slots)
        for session, assignment, until in draft.seated.values():
            self.presence.expect(draft.underway.running[assignment.task].id, assignment)
            self.pool.assign(session, assignment, until)
        for task, devices in draft.cohorts.items():
            running = draft.underway.running[task]
            self.apart.seat(task, devices, now)
            if not running.value.replaced:
                self.steering.drawn(running.job, now)
