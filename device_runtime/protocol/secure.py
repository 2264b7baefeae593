"""A device's part in a secure round: what it keeps, and the conversation. Spec: docs/spec/wire.md §8.

A device that is killed before its masked report was kept gives the assignment up: the keys of its masks are gone. From
then on it goes on with what it kept, and says again what it said before.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from device_runtime.errors import DeadlinePassed, ReportLost, SecaggRefused
from device_runtime.phases import Phases
from device_runtime.protocol.enrolment import Enrolments
from device_runtime.protocol.transport import Transport
from device_runtime.state.assignment import Kept, KeptAssignment
from device_runtime.state.database import StateDatabase
from fedcore import checkpoint
from fedcore.errors import FedcoreError
from fedcore.masking import layout_hash, masked_segments, model_hash, separate, session_number, task_hash
from fedcore.params import Float32
from fedcore.plan import Plan
from fedcore.report import ReportLayout
from fedcore.wire.messages import Assignment
from secagg.client import Client, Receipt, Step
from secagg.errors import SecaggError
from secagg.messages import Invite
from secagg.parameters import LEAST_COHORT
from secagg.policy import AggregationPolicy

WAIT_S, PAUSE_S = 20.0, 0.2
"""How long a message is waited for in one request, and between two, should the coordinator not hold them back."""


class Answered:
    """The last round of each of a coordinator's tasks that this device answered. Raises StateError."""

    def __init__(self, database: StateDatabase, coordinator: str) -> None:
        self._database = database
        self._coordinator = coordinator

    def last_round(self, task: str) -> int:
        """The greatest session number of the task that this device answered; -1 when it answered none."""
        query = "SELECT number FROM answered WHERE coordinator = ? AND task = ?"
        return max((int(number) for (number,) in self._database.execute(query, self._coordinator, task)), default=-1)

    def answer(self, task: str, number: int) -> None:
        """From now on no round of the task up to this one is answered."""
        self._database.execute("INSERT OR REPLACE INTO answered VALUES (?, ?, ?)", self._coordinator, task, number)


@dataclass(frozen=True, slots=True)
class SecureDelivery:
    """How a kept report gets into the sum of its round.

    least: the fewest reports with which a sum may count. keep_going: asked while waiting; it raises what ends the
    session otherwise. plan: gives an assignment's plan.
    """

    enrolments: Enrolments
    answered: Answered
    transport: Transport
    kept: KeptAssignment
    least: int
    keep_going: Callable[[], bool]
    phase: Phases
    plan: Callable[[Assignment], Plan]

    def check(self, given: Assignment, layout: ReportLayout) -> None:
        """Raise SecaggRefused, before any work is done, for an invitation that this device would not follow.

        Raises StateError or TransportError too: the device must know the coordinator's key.
        """
        with _explained():
            policy, _ = self._standing()
            held = model_hash(given.plan, given.checkpoint), layout_hash(layout)
            _check(policy.accept(given.secagg or b"", held, self.answered.last_round(given.task)), given, layout)

    def run(self, kept: Kept) -> tuple[Kept, Receipt]:
        """Take part to the end, from wherever an earlier process was stopped: what is kept by then, and the receipt.

        Raises SecaggRefused, ReportLost, DeadlinePassed, StateError or TransportError.
        """
        with _explained():
            identity = self.enrolments.identity
            policy, credential = self._standing()
            if kept.phase == "masked":
                client = Client.restore(identity, policy, kept.keep)
                with self.phase("upload"):
                    survivors = self._hear(kept, 6)
            else:
                given = kept.given
                client = Client(identity, policy, credential, self.answered.last_round(given.task))
                kept, survivors = self._mask(kept, client, self.plan(given).report)
            kept, confirmations = self._step(kept, 7, client.survivors(survivors))
            kept, result = self._step(kept, 9, client.confirmations(confirmations))
            return kept, client.result(result)

    def _standing(self) -> tuple[AggregationPolicy, bytes]:
        """What this device insists on, and its credential."""
        self.enrolments.signer(self.transport)
        given = self.enrolments.credential()
        return AggregationPolicy(given.server, given.authority, max(self.least, LEAST_COHORT)), given.credential

    def _mask(self, kept: Kept, client: Client, layout: ReportLayout) -> tuple[Kept, bytes]:
        """Share keys with the cohort, and send the masked report: what is kept by then, and M6."""
        given, invitation = kept.given, kept.given.secagg or b""
        vector_D, weight = separate(layout, self._report(kept, layout))
        advertisement = client.invite(invitation, model_hash(given.plan, given.checkpoint), layout_hash(layout))
        invite, _ = Invite.decode(invitation)
        _check(invite, given, layout)
        self.answered.answer(given.task, invite.round)
        roster = self._say(kept, 1, advertisement)
        client.deliver(self._say(kept, 3, client.roster(roster)))
        step = client.mask(vector_D, min(weight, invite.w_max))
        kept = self.kept.masked(kept, hashlib.sha256(step.message).hexdigest(), step.keep)
        return kept, self._say(kept, 5, step.message)

    def _report(self, kept: Kept, layout: ReportLayout) -> Float32:
        try:
            return checkpoint.decode(self.kept.report(kept), layout.wire)["report"]
        except FedcoreError as error:
            raise ReportLost("the kept report does not fit its plan", str(error)) from error

    def _step(self, kept: Kept, number: int, step: Step) -> tuple[Kept, bytes]:
        kept = self.kept.stepped(kept, step.keep)
        return kept, self._say(kept, number, step.message)

    def _say(self, kept: Kept, number: int, message: bytes) -> bytes:
        """Send a message; the coordinator's next one."""
        with self.phase("upload"):
            answer = self.transport.say(kept.given.assignment, number, message, WAIT_S)
            return self._hear(kept, number + 1) if answer is None else answer

    def _hear(self, kept: Kept, number: int) -> bytes:
        while self.keep_going():
            message = self.transport.hear(kept.given.assignment, number, WAIT_S)
            if message is not None:
                return message
            time.sleep(PAUSE_S)
        raise DeadlinePassed(f"message M{number} of the secure aggregation did not come in time")


def _check(invite: Invite, given: Assignment, layout: ReportLayout) -> None:
    """Refuse an invitation that is for something else than the assignment it came with."""
    if invite.task != task_hash(given.task) or invite.round != session_number(given.round, given.attempt):
        raise SecaggRefused("the invitation is for another task or round than the assignment")
    wanted = [(one.size, one.reduction == "mean") for one in masked_segments(layout)]
    if [(one.size, one.weighted) for one in invite.segments] != wanted:
        raise SecaggRefused("the invitation's segments are not those of the plan's report")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except SecaggError as error:
        raise SecaggRefused(f"{type(error).__name__}: {error}") from error
