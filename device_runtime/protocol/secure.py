"""The device's part in a secure round: its state, and the conversation. Spec: docs/spec/wire.md §8.

A device that is killed before it has stored its masked report gives the assignment up, since the keys of its masks are
gone. If it is killed later, it continues from the stored state and sends the same messages again.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType

from device_runtime.errors import AlreadyRevealed, DeadlinePassed, Phases, Refused, ReportLost, SecaggRefused
from device_runtime.protocol.enrolment import Enrolments
from device_runtime.protocol.transport import Transport
from device_runtime.state.assignment import AssignmentStore, StoredAssignment
from device_runtime.state.database import StateDatabase
from device_runtime.work import decode_unweighted
from fedcore import masking
from fedcore.errors import FedcoreError, visible
from fedcore.params import Float32
from fedcore.plan import Plan
from fedcore.release import Release, Signed, SumBounds, decode_entry, decode_release
from fedcore.report import ReportLayout
from fedcore.wire.messages import Assignment
from secagg.client import Client, SessionInput
from secagg.client_state import AggregationPolicy
from secagg.encoding import MessageType
from secagg.errors import SecaggError
from secagg.messages import Invite, SessionResult
from secagg.packing import PackedSegment, with_noise
from secagg.parameters import LEAST_COHORT, least_honest

WAIT_S, PAUSE_S = 20.0, 0.2
"""The seconds that a request waits for a message, and the seconds between two requests."""


class AnsweredRounds:
    """The last round of each task, and of each release, that this device answered. Raises StateError.

    A coordinator can choose a task's name freely, but cannot offer the model of a release again under another name. An
    evaluation of a round's model counts apart.
    """

    def __init__(self, database: StateDatabase, coordinator: str) -> None:
        self._database = database
        self._coordinator = coordinator

    def last_round(self, assignment: Assignment) -> int:
        """The greatest session number of the task or release that this device answered; -1 if none."""
        query = "SELECT number FROM answered WHERE (coordinator = ? AND task = ?) OR release = ?"
        rows = self._database.execute(query, self._coordinator, assignment.task, _work_of(assignment))
        return max((int(number) for (number,) in rows), default=-1)

    def answer(self, assignment: Assignment, number: int) -> None:
        """Note that this device will not answer this or an earlier round of the task or release again."""
        row = self._coordinator, assignment.task, _work_of(assignment), number
        self._database.execute("INSERT OR REPLACE INTO answered VALUES (?, ?, ?, ?)", *row)


@dataclass(frozen=True, slots=True)
class SecureDelivery:
    """Delivery of a stored report, masked, into the sum of its round.

    least: the fewest reports of a valid sum. keep_going: called while waiting; may raise to end the session. plan:
    gives an assignment's plan.
    """

    enrolments: Enrolments
    answered: AnsweredRounds
    transport: Transport
    assignments: AssignmentStore
    least: int
    keep_going: Callable[[], bool]
    phase: Phases
    plan: Callable[[Assignment], Plan]

    def check(self, assignment: Assignment, layout: ReportLayout) -> None:
        """Raise SecaggRefused, before any work, for an invitation that this device would not accept.

        Raises StateError or TransportError too: the device must know the coordinator's key.
        """
        with _explained():
            self._accept(self._policy(assignment), assignment, layout)

    def run(self, stored: StoredAssignment) -> tuple[StoredAssignment, SessionResult, bytes]:
        """Take part to the end, continuing from where an earlier process stopped. Returns the stored state, the result
        and M12.

        Before shares leave, the whole round is noted as answered: the sums of two attempts could differ by one device,
        and the difference would be its report. With noise, this happens before the masked report leaves: others can
        unmask its sum, and every further sum with this device would reveal more than one round may.

        Raises SecaggRefused, ReportLost, DeadlinePassed, StateError or TransportError.
        """
        with _explained():
            noisy = _bounds_of(stored.given).noise_multiplier
            last = MessageType.MASKED if noisy else MessageType.UNMASK
            client, message = self._resume(stored) if stored.phase == "masked" else self._begin(stored)
            while (reply := client.receive(message)).message is not None:
                if MessageType.of(reply.message) is last:
                    self.answered.answer(stored.given, masking.last_session_number(stored.given.round))
                if reply.keep is not None:
                    stored = self._persist(stored, reply.message, reply.keep)
                message = self._say(stored, reply.message)
            return stored, client.result, message

    def _begin(self, stored: StoredAssignment) -> tuple[Client, bytes]:
        """The client of a new session, and M0. This notes the round, which must happen before M1 leaves."""
        assignment, layout = stored.given, self.plan(stored.given).report
        policy, credential = self._policy(assignment), self.enrolments.credential(self.transport).credential
        values_V, weight = self._values(stored, layout), int(layout.weight(stored.examples))
        invite = self._accept(policy, assignment, layout)
        brought = SessionInput(
            values_V, min(weight, invite.w_max), *_held(assignment, layout), credential,
            self.answered.last_round(assignment), int(self.transport.wall()),
        )  # fmt: skip
        self.answered.answer(assignment, invite.round)
        return Client(self.enrolments.identity, policy, brought), assignment.secagg or b""

    def _resume(self, stored: StoredAssignment) -> tuple[Client, bytes]:
        """The client of a session in which the masked report may have left, and M8."""
        client = Client.restore(self.enrolments.identity, self._policy(stored.given), self.assignments.state(stored))
        with self.phase("upload"):
            return client, self._hear(stored, MessageType.SURVIVORS)

    def _policy(self, assignment: Assignment) -> AggregationPolicy:
        """The policy with the keys that this device pinned. The assignment must show the pinned key or a successor."""
        authority = self.enrolments.credential(self.transport).authority
        return AggregationPolicy(self.enrolments.server(assignment.server), authority, max(self.least, LEAST_COHORT))

    def _accept(self, policy: AggregationPolicy, assignment: Assignment, layout: ReportLayout) -> Invite:
        """The invitation of an assignment, if this device may accept it."""
        last = self.answered.last_round(assignment)
        if last == masking.last_session_number(assignment.round):
            raise AlreadyRevealed(f"this device did its part in an earlier attempt at round {assignment.round}")
        invite = policy.accept(assignment.secagg or b"", _held(assignment, layout), last)
        _check(invite, assignment, layout)
        return invite

    def _values(self, stored: StoredAssignment, layout: ReportLayout) -> Float32:
        try:
            values_V = decode_unweighted(self.assignments.report(stored), layout)
            return masking.summed_values(layout, _bounds_of(stored.given), values_V)
        except FedcoreError as error:
            raise ReportLost("the kept report does not fit its plan", str(error)) from error

    def _persist(self, stored: StoredAssignment, message: bytes, keep: bytes) -> StoredAssignment:
        """Make the state of the session durable. The first state comes with the masked report."""
        if stored.phase == "masked":
            return self.assignments.stepped(stored, keep)
        return self.assignments.masked(stored, hashlib.sha256(message).hexdigest(), keep)

    def _say(self, stored: StoredAssignment, message: bytes) -> bytes:
        """Send a message. Returns the coordinator's next one."""
        number = MessageType.of(message)
        digest = stored.sha256 if number is MessageType.MASKED else ""
        with self.phase("upload"):
            try:
                answer = self.transport.say(stored.given.assignment, number, message, WAIT_S, sha256=digest)
            except Refused as error:
                if error.slug == "unusable-message" and number is MessageType.ADVERTISE:
                    self.enrolments.refused()
                raise
            return self._hear(stored, number + 1) if answer is None else _only(number + 1, answer)

    def _hear(self, stored: StoredAssignment, number: int) -> bytes:
        while self.keep_going():
            message = self.transport.hear(stored.given.assignment, number, WAIT_S)
            if message is not None:
                return _only(number, message)
            time.sleep(PAUSE_S)
        raise DeadlinePassed(f"message M{number} of the secure aggregation did not come in time")


def _release_of(assignment: Assignment) -> Signed:
    if assignment.release is None:
        raise SecaggRefused("the invitation comes without a release")
    return assignment.release


def _released(assignment: Assignment) -> Release:
    return decode_release(_release_of(assignment).text)


def _bounds_of(assignment: Assignment) -> SumBounds:
    return _released(assignment).bounds_of(assignment.plan.sha256)


def _work_of(assignment: Assignment) -> str:
    """The digest of an assignment's release; of an evaluation under it, with the round whose model is evaluated."""
    signed = _release_of(assignment)
    if assignment.lineage is None or _released(assignment).evaluation_by(assignment.plan.sha256) is None:
        return signed.digest
    return f"{signed.digest}/{decode_entry(assignment.lineage.text).round}"


def _held(assignment: Assignment, layout: ReportLayout) -> tuple[bytes, bytes]:
    """The hashes of the model and the layout that this device holds."""
    return masking.model_hash(assignment.plan, assignment.checkpoint), masking.layout_hash(layout, assignment.seed)


def _only(number: int, message: bytes) -> bytes:
    """The message, if it has that number; otherwise a coordinator could make a device repeat a step forever."""
    if MessageType.of(message) != number:
        raise SecaggRefused(f"M{message[0]} of the secure aggregation came instead of M{number}")
    return message


def _check(invite: Invite, assignment: Assignment, layout: ReportLayout) -> None:
    """Raise SecaggRefused for an invitation that is not for its assignment, or contradicts the release."""
    if invite.task != masking.task_hash(assignment.task) or invite.round != masking.session_number(
        assignment.round, assignment.attempt
    ):
        raise SecaggRefused("the invitation is for another task or round than the assignment")
    if layout.has_codecs and _released(assignment).seed != assignment.seed:
        raise SecaggRefused("the report's codecs have another seed than the released one")
    bounds = _bounds_of(assignment)
    if assignment.target != bounds.target:
        raise SecaggRefused(
            f"the assignment is for {_wanted(assignment.target)}, and the release is for {_wanted(bounds.target)}"
        )
    if invite.min_sum < bounds.min_sum:
        raise SecaggRefused(f"the sum may be over {invite.min_sum} devices, the release demands {bounds.min_sum}")
    if invite.w_max != masking.greatest_weight(layout, bounds):
        raise SecaggRefused(f"the greatest weight is {invite.w_max}, not the one that is released")
    honest = least_honest(invite.min_sum, invite.n_max)
    if bounds.noise_multiplier and not 1 <= bounds.honest <= honest:
        raise SecaggRefused(
            f"noise is to come from {bounds.honest} devices, and a sum over {invite.min_sum} of a roster of up to "
            f"{invite.n_max} may have {honest} honest ones"
        )
    if bounds.noise_multiplier and layout.weighting != "uniform":
        raise SecaggRefused(
            "noise would hide the values of the report, and not the number of examples that weighs them"
        )
    if [replace(segment, field_bits=0) for segment in invite.segments] != _demanded(layout, bounds):
        raise SecaggRefused("the invitation's segments are not those of the plan's report under the release's bounds")


def _wanted(target: str | UnsetType) -> str:
    return "any device" if target is UNSET else f"devices with {visible(target)}"


def _demanded(layout: ReportLayout, bounds: SumBounds) -> list[PackedSegment]:
    """The segments that release and plan demand, except for the width of their fields."""
    return [
        with_noise(
            PackedSegment(point.size, 0, point.bits, point.low, point.high, point.norm, point.weighted),
            bounds.noise_multiplier,
            bounds.honest,
        )
        for point in masking.fixed_points(layout, bounds)
    ]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except SecaggError as error:
        raise SecaggRefused(f"{type(error).__name__}: {error}") from error
