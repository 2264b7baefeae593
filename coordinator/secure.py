"""A secure round: the server's end of SA1 over one cohort, with seats, deadlines and devices that wait.

Spec: docs/spec/wire.md §8. Time is an argument; the driver owns it. Nothing here is ever stored: a restart abandons it.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.errors import ConflictingReport, NoLongerNeeded, Refusal, UnusableMessage
from coordinator.keys import Keys
from coordinator.rounds import Abandon, Summed
from coordinator.submissions import Hear, Say, settle
from coordinator.task_settings import Secagg, TaskSettings
from fedcore.masking import layout_hash, masked_segments, model_hash, reunite, session_number, task_hash
from fedcore.plan import Plan
from fedcore.report import ReportLayout
from fedcore.report import Segment as ReportSegment
from fedcore.wire.messages import Assignment
from secagg.errors import BelowThreshold, SecaggError
from secagg.messages import ACTIVE, Invite
from secagg.packing import Segment
from secagg.server import Phase, Server

BEACON_BYTES = 32
UPLOAD = int(Phase.UPLOADING)
RESULT = int(Phase.OVER)
# Metric sums are fixed-point numbers with three bits behind the point: counts are exact, and sums reach 65,535.
SUM_BITS, SUM_STEP = 20, 0.125
_LOG = logging.getLogger(__name__)


def invitation(settings: TaskSettings, plan: Plan, given: Assignment, deadline: int) -> Invite:
    """M0's content for the round of `given`; `deadline` is in Unix seconds. The task must ask for masked reports."""
    policy, secagg = settings.policy, settings.secagg or Secagg()
    return Invite(
        mode=ACTIVE,
        task=task_hash(given.task),
        round=session_number(given.round, given.attempt),
        deadline=deadline,
        n_max=policy.cohort,
        min_sum=policy.minimum,
        w_max=secagg.max_examples if plan.report.weighting == "examples" else 1,
        layout_hash=layout_hash(plan.report),
        model_hash=model_hash(given.plan, given.checkpoint),
        segments=tuple(_segment(one, secagg, policy.cohort) for one in masked_segments(plan.report)),
    )


def _segment(one: ReportSegment, secagg: Secagg, devices: int) -> Segment:
    """How a segment of the report becomes fixed-point numbers, in fields just wide enough for the sum."""
    if one.reduction == "mean":
        clip, bits = secagg.clip_norm, secagg.bits
        return Segment(one.size, _field_bits(bits, devices), bits, -clip, clip, norm=clip, weighted=True)
    half = 1 << SUM_BITS - 1
    return Segment(one.size, _field_bits(SUM_BITS, devices), SUM_BITS, -half * SUM_STEP, (half - 1) * SUM_STEP)


def _field_bits(bits: int, devices: int) -> int:
    return (devices * ((1 << bits) - 1)).bit_length()


@dataclass(frozen=True, slots=True)
class Pace:
    """When phases end: training at `trained_by`, or `phase_s` after `goal` devices came; the others after `phase_s`."""

    goal: int
    trained_by: float
    phase_s: float


class SecureRound:
    """One attempt at a round. `seats` are the slots by assignment; whatever they send is folded in and forgotten."""

    def __init__(self, invite: Invite, keys: Keys, seats: Mapping[str, int], pace: Pace) -> None:
        authority = keys.authority.public_key().public_bytes_raw()
        self._server = Server(invite, keys.server, authority)
        self._seats = dict(seats)
        self._phase_s, self._goal = pace.phase_s, pace.goal
        self._until = pace.trained_by
        self._due = set(self._seats.values())
        self._here: set[int] = set()
        self._digests: dict[tuple[int, int], str] = {}
        self._outbox: dict[tuple[int, int], bytes] = {}
        self._listeners: list[tuple[Hear, Future[Any], float]] = []
        self._sum: tuple[int, NDArray[np.float64]] | None = None
        self.invitation = self._server.invitation
        self.event: Summed | Abandon | None = None
        self.ended_at: float | None = None

    def __contains__(self, assignment: str) -> bool:
        return assignment in self._seats

    @property
    def uploads(self) -> dict[str, str]:
        """The digest of every masked report that was folded in, by assignment."""
        found = ((name, self._digests.get((slot, UPLOAD))) for name, slot in self._seats.items())
        return {name: digest for name, digest in found if digest is not None}

    def total(self, layout: ReportLayout) -> NDArray[np.float64]:
        """The summed report, float64 (L,), once `event` is Summed."""
        if self._sum is None:
            raise RuntimeError("there is no sum")
        return reunite(layout, *self._sum)

    def say(self, request: Say, now: float) -> None:
        """Take a device's message. The same one again changes nothing.

        Raises ConflictingReport when another came before, NoLongerNeeded when it is late, UnusableMessage.
        """
        slot, digest = self._seats[request.assignment], hashlib.sha256(request.message).hexdigest()
        known = self._digests.get((slot, request.number))
        if known == digest:
            return
        if known is not None:
            raise ConflictingReport(f"another message M{request.number} of this assignment was taken before")
        if self.ended_at is not None or slot not in self._due or request.number < self._server.phase:
            raise NoLongerNeeded(f"message M{request.number} comes too late, or the aggregation goes on without it")
        if request.number != self._server.phase:
            raise UnusableMessage(f"message M{request.number} is not due yet")
        try:
            self._server.receive(slot, request.message)
        except SecaggError as error:
            raise UnusableMessage(f"{type(error).__name__}: {error}") from error
        self._digests[slot, request.number] = digest
        self._here.add(slot)
        if self._server.phase is Phase.ADVERTISING and len(self._here) == self._goal:
            self._until = min(self._until, now + self._phase_s)

    def hear(self, request: Hear, answer: Future[Any], now: float) -> None:
        """Park `answer` until the message is there, nobody will ever send it, or the wait is over (None)."""
        self._listeners.append((request, answer, now + request.wait_s))

    def dismiss(self, refusal: Refusal) -> None:
        """Answer whoever waits with a refusal."""
        for _, answer, _ in self._listeners:
            settle(answer, refusal)
        self._listeners = []

    def leave(self, assignment: str) -> None:
        """Go on without a device, which said that it gives up."""
        self._due.discard(self._seats[assignment])

    def advance(self, now: float) -> None:
        """End every phase that is due, and answer whoever waits."""
        while self.event is None and self.ended_at is None and (self._due <= self._here or now >= self._until):
            self._close(now)
        waiting = self._listeners
        self._listeners = [one for one in waiting if not self._answered(*one, now)]

    def finish(self, now: float) -> None:
        """The round is over: release no share any more, and hand out results (M10). May be repeated."""
        if self.ended_at is None:
            self.ended_at = now
            self._server.abort()
            self._outbox |= {(slot, RESULT): message for slot, message in self._server.results().items()}
        self.advance(now)

    def _close(self, now: float) -> None:
        phase = self._server.phase
        try:
            if phase is Phase.ADVERTISING:
                self._server.fix_roster()
                messages = self._server.open_roster(secrets.token_bytes(BEACON_BYTES))
            elif phase is Phase.REVEALING:
                found = self._server.unmask()
                self._sum, self.event = (found.weight, found.sums), Summed(found.devices)
                return
            else:
                messages = self._server.close_phase()
        except BelowThreshold as error:
            _LOG.info("a secure aggregation ended while %s: %s", phase.name.lower(), error)
            self.event = Abandon("too-few-reports")
        except SecaggError as error:
            _LOG.warning("a secure aggregation failed while %s: %s", phase.name.lower(), error)
            self.event = Abandon("secagg-failed")
        else:
            self._outbox |= {(slot, phase + 1): message for slot, message in messages.items()}
            self._due, self._here, self._until = set(messages) & self._due, set(), now + self._phase_s

    def _answered(self, request: Hear, answer: Future[Any], until: float, now: float) -> bool:
        slot, number = self._seats[request.assignment], request.number
        message = self._outbox.get((slot, number))
        if message is not None:
            settle(answer, message)
        elif self.ended_at is not None or slot not in self._due or number < self._server.phase:
            settle(answer, NoLongerNeeded(f"no message M{number} will come: the aggregation goes on without this one"))
        elif now >= until:
            settle(answer, None)
        return answer.done()
