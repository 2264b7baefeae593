"""SecureRound: the server's end of SA1 over one cohort, in groups, with its terms, seats and deadlines.

Spec: docs/spec/wire.md §8. Time is an argument; the driver owns it. Nothing here is ever stored: a restart abandons it.

The cohort advertises together. The devices that did are dealt into groups, each a session of its own. They take
one step together: no group tells its devices who survived before all groups have their masked reports. If those are too
few in all, no share is ever asked for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.commands import AwaitMessage, PutMessage, settle
from coordinator.errors import ConflictingReport, NoLongerNeeded, Refusal, UnusableMessage
from coordinator.keys import Keys
from coordinator.rules.private_sums import packed_segments
from coordinator.rules.progress import UNMASKING
from coordinator.rules.replicas import MaskedShare
from coordinator.rules.rounds import REPLACING_S, Abandon, RoundPolicy, Summed
from coordinator.rules.states import AssignmentState, LeftOut
from coordinator.rules.task_settings import PHASES_AFTER_TRAINING, Secagg, TaskSettings
from coordinator.secure.group import Executors, Group
from fedcore.masking import greatest_weight, join_weight, layout_hash, model_hash, session_number, task_hash
from fedcore.plan import Plan
from fedcore.report import ReportLayout
from fedcore.signing import SigningKey, Succession
from fedcore.wire.messages import Assignment
from secagg.encoding import MessageType
from secagg.errors import SecaggError
from secagg.masking import Words
from secagg.messages import ACTIVE, Invite
from secagg.server import Server
from secagg.session import ExpectedVector, SessionPhase


def invitation(
    settings: TaskSettings, policy: RoundPolicy, plan: Plan, assignment: Assignment, deadline: int
) -> Invite:
    """The content of M0 for an assignment's round. deadline: in Unix seconds. The task must ask for masked reports."""
    bounds, secagg = settings.sum_bounds, settings.secagg or Secagg()
    largest = min(policy.cohort, secagg.group_size)
    return Invite(
        mode=ACTIVE,
        task=task_hash(assignment.task),
        round=session_number(assignment.round, assignment.attempt),
        deadline=deadline,
        n_max=largest,
        min_sum=bounds.min_sum,
        w_max=greatest_weight(plan.report, bounds),
        layout_hash=layout_hash(plan.report, assignment.seed),
        model_hash=model_hash(assignment.plan, assignment.checkpoint),
        segments=packed_segments(plan.report, bounds, largest),
    )


@dataclass(frozen=True, slots=True)
class SecureRoundSettings:
    """Sizes and times of a round: fewer than `minimum` devices in all do not count, more than `group_size` are divided.

    Training ends at `training_deadline`, or `phase_s` after `goal` devices came; every other phase after `phase_s`, and
    all of them at `deadline`.
    """

    goal: int
    minimum: int
    group_size: int
    training_deadline: float
    phase_s: float
    deadline: float

    @classmethod
    def of(cls, secagg: Secagg | None, policy: RoundPolicy, deadline: float) -> SecureRoundSettings:
        """The settings of a round whose reporting deadline is this, on the driver's clock."""
        secagg = secagg or Secagg()
        training_deadline = deadline - PHASES_AFTER_TRAINING * secagg.phase_s
        return cls(policy.goal, policy.minimum, secagg.group_size, training_deadline, secagg.phase_s, deadline)


_OF_FAILURES = (Abandon("sum-out-of-range"), Abandon("no-beacon"), Abandon("secagg-failed"))
"""What becomes of a round for the failures of its groups, the gravest first."""


@dataclass(frozen=True, slots=True)
class SecureRoundFactory:
    """Maker of secure rounds, with the coordinator's key and those who do what takes long.

    authority: the public key of the enrolment authority; without one there are no secure rounds.
    lineage: signs the checkpoints that rounds lead to.
    """

    keys: Keys
    authority: bytes | None
    executors: Executors
    lineage: SigningKey

    def open(self, invite: Invite, seats: Mapping[str, int], settings: SecureRoundSettings) -> SecureRound:
        """A round in which `seats` are the slots by assignment."""
        key = self.keys.server
        lobby = Server(invite, key.private, self.authority)
        return SecureRound(lobby, key.succession, self.executors, seats, settings)


class SecureRound:
    """One attempt at a round. A message of a device is folded in and forgotten.

    invitation, server: M0, and the key that signed it with those that it succeeds.
    """

    def __init__(
        self,
        lobby: Server,
        server: Succession,
        executors: Executors,
        seats: Mapping[str, int],
        settings: SecureRoundSettings,
    ) -> None:
        self.server = server
        self._seats, self._settings = dict(seats), settings
        self._lobby = Group(lobby, executors, self._seats.values(), settings.training_deadline)
        self._groups = [self._lobby]
        self._group_of = dict.fromkeys(self._seats.values(), self._lobby)
        self._digests: dict[tuple[int, int], str] = {}
        self._outbox: dict[tuple[int, int], bytes] = {}
        self._listeners: dict[tuple[str, int], tuple[Future[Any], float]] = {}
        self._lost, self._late, self._lost_with_sums = set[int](), set[int](), set[int]()
        self._sums_due_at = math.inf
        # The message after which a device joins no other attempt at the round.
        self._last_word = MessageType.MASKED if Invite.decode(lobby.invitation)[0].noisy else MessageType.UNMASK
        self.invitation = lobby.invitation
        self.event: Summed | Abandon | None = None
        self.ended_at: float | None = None

    def __contains__(self, assignment: str) -> bool:
        return assignment in self._seats

    @property
    def unmasking(self) -> bool:
        """Whether sums are being made, and no device is waited for any more."""
        return any(group.unmasking for group in self._groups) and all(
            group.over or group.unmasking for group in self._groups
        )

    @property
    def standing(self) -> tuple[str, int, int]:
        """The phase that the slowest group is in, how many of its devices have done their part, and how many must.

        While sums are made the phase is "unmasking", and the numbers are those of the devices in them.
        """
        if self.unmasking or not self._open():
            return UNMASKING, self._counted(), self._counted()
        phase = min(group.phase for group in self._open())
        slowest = [group for group in self._open() if group.phase is phase]
        return phase.name.lower(), sum(group.present for group in slowest), sum(group.asked for group in slowest)

    @property
    def advertising(self) -> bool:
        """Whether devices may still join."""
        return self._lobby.phase is SessionPhase.ADVERTISING

    @property
    def proven(self) -> bool:
        """Whether a device has carried the plan out: it trains before it says anything."""
        return bool(self._digests)

    @property
    def masked(self) -> frozenset[str]:
        """The assignments whose masked reports came, or may be in another replica's sum; also of groups that failed."""
        return frozenset(name for name, slot in self._seats.items() if self._has_masked(slot))

    def _has_masked(self, slot: int) -> bool:
        return (slot, MessageType.MASKED) in self._digests or self._group_of[slot].remote.claimed(slot)

    @property
    def missing(self) -> dict[str, AssignmentState]:
        """How assignments end that it goes on without, unless it may still count their masked reports."""
        gone = dict.fromkeys(self._late, AssignmentState.EXPIRED) | dict.fromkeys(self._lost, AssignmentState.LOST)
        if not gone:
            return {}
        return {name: gone[slot] for name, slot in self._seats.items() if slot in gone and not self._may_count(slot)}

    def _may_count(self, slot: int) -> bool:
        """Whether a masked report came of a slot that is, or may yet be, in a sum."""
        if self.event is None:
            return self._has_masked(slot)
        return isinstance(self.event, Summed) and self.event.devices > 0 and slot in self._group_of[slot].in_sum

    @property
    def uploads(self) -> dict[str, str]:
        """The digest of every masked report that is in a sum, by assignment, but for groups that failed."""
        return {
            name: self._digests[slot, MessageType.MASKED]
            for name, slot in self._seats.items()
            if slot in self._group_of[slot].in_sum
        }

    @property
    def left_out(self) -> dict[str, LeftOut]:
        """Why devices must not be drawn for the next attempt, by assignment."""
        suspects = frozenset[int]().union(*(group.suspects for group in self._groups))
        return {
            name: LeftOut.REVEALED if (slot, self._last_word) in self._digests else LeftOut.SUSPECTED
            for name, slot in self._seats.items()
            if slot in suspects or (slot, self._last_word) in self._digests
        }

    def total(self, layout: ReportLayout) -> NDArray[np.float64]:
        """The summed report, float64 (L,), once `event` is Summed."""
        totals = [group.sum.total for group in self._groups if group.sum is not None]
        if not totals:
            raise RuntimeError("there is no sum")
        total = reduce(operator.add, totals)
        return join_weight(layout, total.weight, total.sums)

    def receive(self, command: PutMessage, now: float) -> None:
        """Take a device's message. The same one again changes nothing.

        Raises ConflictingReport when another came before, NoLongerNeeded when it is late, UnusableMessage.
        """
        slot = self._seats[command.assignment]
        group = self._listening(slot, command.number, command.sha256)
        if group is None:
            return
        try:
            group.receive(slot, command.message, bytes.fromhex(command.device))
        except SecaggError as error:
            raise _unusable(error) from error
        self._digests[slot, command.number] = command.sha256
        if group.phase is SessionPhase.ADVERTISING and group.present == self._settings.goal:
            group.end_by(now + self._settings.phase_s)

    def _listening(self, slot: int, number: int, sha256: str) -> Group | None:
        """The group that waits for a message; None when it has this very one. Raises as `receive` does."""
        group, earlier = self._group_of[slot], self._digests.get((slot, number))
        if earlier == sha256:
            return None
        if earlier is not None:
            raise ConflictingReport(f"another message M{number} of this assignment was taken before")
        if self.ended_at is not None or not group.waits_for(slot) or number < group.phase:
            raise NoLongerNeeded(f"message M{number} comes too late, or the aggregation goes on without it")
        if number != group.phase:
            raise UnusableMessage(f"message M{number} is not due yet")
        return group

    # --- masked reports that other replicas add

    def grant(self, assignment: str, sha256: str, replica: str) -> ExpectedVector | None:
        """Let another replica add a masked report, and no other: what it must be; None when it was taken before.

        Raises what `receive` would; Unavailable while another replica may.
        """
        slot = self._seats[assignment]
        group = self._listening(slot, MessageType.MASKED, sha256)
        if group is None:
            return None
        if self._sums_due_at < math.inf:
            raise NoLongerNeeded("the masked report comes too late: the sum is being made")
        try:
            return group.grant(slot, replica, sha256)
        except SecaggError as error:
            raise _unusable(error) from error

    def release(self, replica: str, checking: Collection[str]) -> None:
        """Drop the grants of a replica that came to nothing: of reports that it neither told of nor is `checking`."""
        slots = {self._seats[name] for name in checking if name in self._seats}
        for group in self._groups:
            group.remote.release(replica, slots)

    def take_share(self, replica: str, share: MaskedShare, words: Words | None) -> bool:
        """Hear which reports another replica has added, and take its sum if that comes. Whether more may be said of it.

        A sum that is not of all the reports told of is given up.
        """
        group = next((one for one in self._groups if one.session == share.session), None)
        if group is None or self.ended_at is not None or group.over or group.phase is not SessionPhase.UPLOADING:
            return False
        signatures = {self._seats[one.assignment]: one.signature for one in share.taken if one.assignment in self}
        for slot, sha256 in group.added(replica, signatures).items():
            self._digests[slot, MessageType.MASKED] = sha256
        if words is not None:
            self._lost_with_sums |= group.merge(replica, share.count, words)
        return not group.remote.handed(replica)

    def wanted(self, replica: str, now: float) -> list[bytes]:
        """The sessions whose sums another replica must hand over now."""
        if self.ended_at is not None or not self._all_uploaded(now):
            return []
        self._sums_due_at = min(self._sums_due_at, now)
        return [group.session for group in self._uploading() if replica in group.remote.owing]

    def _uploading(self) -> list[Group]:
        return [group for group in self._open() if group.phase is SessionPhase.UPLOADING]

    def _all_uploaded(self, now: float) -> bool:
        """Whether every group has its masked reports, or had time for them."""
        return all(
            group.phase > SessionPhase.UPLOADING or (group.phase is SessionPhase.UPLOADING and group.is_due(now))
            for group in self._open()
        )

    def _has_sums(self, now: float) -> bool:
        """Whether no other replica owes a sum. From the first call on they must hand them over, in half a phase."""
        self._sums_due_at = min(self._sums_due_at, now)
        if now >= self._sums_due_at + self._settings.phase_s / 2:
            for group in self._uploading():
                self._lost_with_sums |= group.give_up_sums()
        return not any(group.remote.owing for group in self._uploading())

    def wait(self, command: AwaitMessage, answer: Future[Any], now: float) -> None:
        """Park `answer` until the message is there, will never come, or the wait is over (None).

        An older one for the same message gets None now: who asks again and again keeps one place.
        """
        awaited = command.assignment, command.number
        older = self._listeners.pop(awaited, None)
        if older is not None:
            settle(older[0], None)
        self._listeners[awaited] = answer, now + command.wait_s

    def dismiss(self, refusal: Refusal) -> None:
        """Answer every device that waits with a refusal."""
        for answer, _ in self._listeners.values():
            settle(answer, refusal)
        self._listeners.clear()

    def join(self, seats: Mapping[str, int]) -> None:
        """Wait for more devices, while `advertising`; slots by assignment."""
        self._seats |= seats
        self._group_of |= dict.fromkeys(seats.values(), self._lobby)
        self._lobby.join(seats.values())

    def leave(self, assignment: str) -> None:
        """Go on without a device, which said that it gives up."""
        self._go_on_without(self._seats[assignment])

    def _go_on_without(self, slot: int) -> None:
        if self._has_masked(slot):
            self._group_of[slot].pass_over(slot)
        else:
            self._group_of[slot].leave(slot)

    def lose(self, assignment: str, now: float) -> None:
        """Go on without a device that vanished, or wait a little for another in its place if there are too few."""
        slot = self._seats[assignment]
        self._go_on_without(slot)
        if slot not in self._late and not self._has_masked(slot):
            self._lost.add(slot)
        if self.advertising and self._lobby.counted < self._settings.minimum:
            self._lobby.end_after(now + REPLACING_S)

    def advance(self, now: float) -> None:
        """End every phase that is due, take up every sum that was made, and answer devices that wait."""
        while self.event is None and self.ended_at is None and self._move(now):
            pass
        if self.event is None and self.ended_at is None and now >= self._settings.deadline and not self.unmasking:
            # Whoever had less than half of a phase to answer is not to blame.
            self._note_missing(*(group for group in self._groups if group.is_due(now + self._settings.phase_s / 2)))
            self.event = Summed(0, self.proven)
        waiting = self._listeners.items()
        self._listeners = {
            awaited: listener for awaited, listener in waiting if not self._answered(*awaited, *listener, now)
        }

    def finish(self, now: float) -> None:
        """The round is over: release no share any more, and hand out results (M12). May be repeated."""
        if self.ended_at is None:
            self.ended_at = now
            for group in self._groups:
                self._say(MessageType.RESULT, group.stop("too-few-reports"))
        self.advance(now)

    def _move(self, now: float) -> bool:
        """One step; whether there was one to take."""
        settled = [group for group in self._groups if group.settle()]
        due = [group for group in self._groups if group.is_due(now)]
        if not (self._all_uploaded(now) and self._has_sums(now)):
            due = [group for group in due if group.phase is not SessionPhase.UPLOADING]
        said = [(group.phase.then, self._close(group, now)) for group in due]
        # While devices may still join, it is the round that knows how many more there may be.
        short = not self.advertising and self._counted() < self._settings.minimum
        if short or all(group.over for group in self._groups):
            self.event = self._verdict()
            return False
        for number, messages in said:
            self._say(number, messages)
        return bool(settled or due)

    def _open(self) -> list[Group]:
        return [group for group in self._groups if not group.over]

    def _counted(self) -> int:
        return sum(group.counted for group in self._groups)

    def _close(self, group: Group, now: float) -> Mapping[int, bytes]:
        # Whoever is not there when enough others are holds up nothing.
        if group.phase is not SessionPhase.ADVERTISING or group.present < self._settings.goal:
            self._note_missing(group)
        # What sums of other replicas took is a part of the next phase, so that all phases end in time.
        began = min(now, self._sums_due_at) if group.phase is SessionPhase.UPLOADING else now
        until = began + self._settings.phase_s
        if group.phase is not SessionPhase.ADVERTISING:
            return group.advance(until)
        parts = group.divide(self._settings.group_size)
        self._groups = list(parts)
        self._group_of |= {slot: part for part, slots in parts.items() for slot in slots}
        return {slot: message for part in parts for slot, message in part.advance(until).items()}

    def _note_missing(self, *groups: Group) -> None:
        self._late |= set[int]().union(*(group.missing for group in groups)) - self._lost

    def _verdict(self) -> Summed | Abandon:
        devices = self._counted()
        if devices >= self._settings.minimum:
            return Summed(devices)
        failures = {group.failure for group in self._groups}
        for verdict in _OF_FAILURES:
            if verdict.reason in failures:
                return verdict
        if any(group.suspects for group in self._groups):
            return Abandon("culprits-known")
        if self._lost_with_sums:
            return Abandon("replica-lost")
        return Summed(0, self.proven)

    def _say(self, number: MessageType, messages: Mapping[int, bytes]) -> None:
        self._outbox |= {(slot, number): message for slot, message in messages.items()}
        if number <= MessageType.SURVIVORS:
            # A device that is sent this has answered the message before it, and one that stops before M7 gives up.
            for slot in messages:
                self._outbox.pop((slot, number - 2), None)

    def _answered(self, assignment: str, number: int, answer: Future[Any], until: float, now: float) -> bool:
        slot = self._seats[assignment]
        group, message = self._group_of[slot], self._outbox.get((slot, number))
        if message is not None:
            settle(answer, message)
        elif self.ended_at is not None or not group.waits_for(slot) or number < group.phase:
            settle(answer, NoLongerNeeded(f"no message M{number} will come: the aggregation goes on without this one"))
        elif now >= until:
            settle(answer, None)
        return answer.done()


def _unusable(error: SecaggError) -> UnusableMessage:
    return UnusableMessage(f"{type(error).__name__}: {error}")
