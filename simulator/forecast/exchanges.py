"""The exchanges of a secure round in virtual time: who takes part in each, and when it ends.

Spec: docs/spec/wire.md §8. A secure round of the coordinator folds in messages; here they are only counted. Its groups
stand and fall together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coordinator.rules.rounds import REPLACING_S, RoundPolicy
from coordinator.rules.task_settings import PHASES_AFTER_TRAINING, Secagg
from secagg.parameters import find
from secagg.session import SessionPhase

_AFTER = {
    SessionPhase.ADVERTISING: SessionPhase.SHARING,
    SessionPhase.SHARING: SessionPhase.OPENING,
    SessionPhase.OPENING: SessionPhase.UPLOADING,
    SessionPhase.UPLOADING: SessionPhase.CONFIRMING,
    SessionPhase.CONFIRMING: SessionPhase.REVEALING,
    SessionPhase.REVEALING: SessionPhase.OVER,
}


@dataclass(slots=True)
class Exchanges:
    """The exchanges of one attempt at a round that must be over at `deadline`.

    due: rows of the devices that are waited for; sent: of those that have answered. masked: rows of those whose masked
    reports came, once that exchange is over.
    """

    policy: RoundPolicy
    secagg: Secagg
    deadline: float
    phase: SessionPhase = SessionPhase.ADVERTISING
    due: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    masked: frozenset[int] = frozenset()
    lost: int = 0
    _until: float = math.inf
    _not_before: float = -math.inf
    _least: int = 0

    def __post_init__(self) -> None:
        self._until = self.deadline - PHASES_AFTER_TRAINING * self.secagg.phase_s

    @property
    def advertising(self) -> bool:
        """Whether devices may still join."""
        return self.phase is SessionPhase.ADVERTISING

    @property
    def short(self) -> bool:
        """Whether too few are left for a sum: fewer than count, or than must reveal the secrets of the others."""
        if self.advertising:
            return False
        left = len(self.due | self.sent)
        return left < self._least or (not self.masked and left < self.policy.minimum)

    def join(self, rows: list[int]) -> None:
        """Wait for devices that were drawn."""
        self.due.update(rows)
        self._not_before = -math.inf

    def leave(self, row: int, now: float, *, lost: bool) -> None:
        """Go on without a device, or wait a little for another in the place of one that was lost."""
        self.due.discard(row)
        self.lost += lost
        if lost and self.advertising and len(self.due) < self.policy.minimum:
            self._not_before = now + REPLACING_S

    def take(self, row: int, now: float) -> None:
        """Take the message of a device that is waited for."""
        self.sent.add(row)
        if self.advertising and len(self.sent) == self.policy.goal:
            self._until = min(self._until, now + self.secagg.phase_s)

    def ends(self, now: float) -> bool:
        """Whether the exchange ends now: everybody answered, or the time is up."""
        if self.phase is SessionPhase.OVER or now < self._not_before:
            return False
        return self.due <= self.sent or now >= self._until

    def go_on(self, now: float) -> list[int]:
        """End the exchange. Gives the rows that take part in the next one."""
        going = self.due & self.sent
        if self.phase is SessionPhase.UPLOADING:
            self.masked = frozenset(going)
        if self.advertising and going:
            parameters = find(max(8, -(-len(going) // -(-len(going) // self.secagg.group_size))))
            self._least = math.ceil(len(going) * parameters.t / parameters.n)
        self.phase, self.due, self.sent = _AFTER[self.phase], going, set()
        self._until = now + self.secagg.phase_s
        return sorted(going)
