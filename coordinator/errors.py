"""Errors of the coordinator.

CoordinatorError
├── InvalidSettings         a setting of the service is unknown or has a wrong value
├── UnreadableBlob          a blob that a task needs is missing or was altered
├── UnusableStore           database or blobs are not there, or not as this version can use them; nothing was changed
├── BeaconUnavailable       the enrolment authority drew no beacon for a secure round
├── WebhookFailed           the receiver of alerts was not reached or did not take one, or there is none
├── DatabaseLocked          another transaction holds what this one would write
├── LeaseLost               another replica drives a population that this one believed its own
├── KeysDiffer              the file of a key holds another key than the one that the store knows
├── KeysMissing             the file of a key that the store knows is not there
├── StoreConflict           a row is not in the state that this process believed: another one changed it
├── UnexpectedEvent         a state machine was handed an event that its state cannot take (a bug in the caller)
├── KeysDamaged             the file of a key holds something else, or cannot be read
├── NonFiniteState          the algorithm's next state holds an infinite or undefined number
├── BrokenAudit             the audit log is not as it was written
├── UnknownDeviceId         no device has the id that an operator named
├── InvalidModel            a model cannot be released, or rolled out, as an operator asked
├── UnknownModel            no model has that name in the population, or no such version was released
├── TokenError
│   ├── InvalidToken        a token's name, or its time, cannot be
│   ├── UnknownToken        there is no such token to revoke
│   ├── BadToken            a token is unknown, revoked or expired
│   └── RoleLacking         a token is good, and its role does not allow what was asked
│       └── ForgedForm      a form was not sent from a page of the session that it came with
├── InvalidBudget           a population's privacy budget cannot be, or less than its tasks have spent
├── InvalidTask             the task's settings contradict each other, or do not fit the bundle
│   └── BudgetExceeded      the task would exceed the privacy budget of its population
├── UnknownTask             no task has that id
├── UnknownRound            the task has no such round, or it was not committed
├── NotPrivate              the task promises no privacy, and so has no certificate
├── WrongKind               a question was asked for its model, or another task for its answer
├── TaskEnded               the task is over, or not in a state that the operation starts from
└── Refusal                 an answer to a device; each is one problem type of fedcore.wire.messages
    ├── MalformedMessage · UnknownPopulation · UnknownSession · UnknownAssignment · UnknownBlob · NoModel
    ├── UnknownDevice · ReplayedSignature       (beside fedcore's RequestError, about a request's signature and body)
    ├── DeviceRevoked · NotAttested · ForeignSession · ForeignAssignment
    ├── ConflictingReport · MismatchingOffset · InvalidReport · UnusableMessage
    ├── TooLarge · RangeNotSatisfiable
    └── NoLongerNeeded (TooStale) · Unavailable · TooManyRequests   (each with a retry window)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from fedcore import validation


class CoordinatorError(Exception):
    """Base of every error raised by `coordinator`."""


def demand(met: bool, name: str, allowed: str, value: object) -> None:
    """Raise InvalidTask, naming a setting and what it may be, unless `met`."""
    validation.demand(InvalidTask, met, name, allowed, value)


class Demands:
    """Demands on settings, all of which are looked at before one error names what does not meet them."""

    def __init__(self) -> None:
        self._sentences: list[str] = []

    def __call__(self, met: bool, name: str, allowed: str, value: object) -> None:
        """Note that a setting must be something else, unless `met`."""
        with self.noting():
            demand(met, name, allowed, value)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A block whose InvalidTask is noted."""
        try:
            yield
        except InvalidTask as error:
            self._sentences += error.sentences

    def settle(self) -> None:
        """Raise InvalidTask with what was noted, if anything was."""
        if self._sentences:
            raise InvalidTask(*self._sentences)


class InvalidSettings(CoordinatorError):
    """A setting of the service is unknown or has a wrong value; the message names it and its source."""


class BeaconUnavailable(CoordinatorError):
    """The enrolment authority drew no beacon for a secure round: it cannot be reached, or refuses."""


class WebhookFailed(CoordinatorError):
    """The receiver of alerts cannot be reached or does not take one, or no receiver is set."""


class UnreadableBlob(CoordinatorError):
    """A blob that a task needs is missing or was altered."""


class UnusableStore(CoordinatorError):
    """Database, blobs or keys are not where they were named, or not as this version can use them: the message says."""


class LeaseLost(CoordinatorError):
    """Another replica drives `populations`, which this one believed its own."""

    def __init__(self, populations: frozenset[str]) -> None:
        super().__init__(f"another replica drives {', '.join(sorted(populations))} now; nothing was written")
        self.populations = populations


class DatabaseLocked(CoordinatorError):
    """Another transaction holds what this one would write, and it was not to wait: nothing was written."""


class KeysDiffer(CoordinatorError):
    """The file of a key holds another key than the one that the store knows."""


class KeysMissing(CoordinatorError):
    """The file of a key that the store knows is not there."""


class StoreConflict(CoordinatorError):
    """A row is not in the state that this process believed: another one changed it."""


class UnexpectedEvent(CoordinatorError):
    """A state machine was handed an event that its state cannot take."""


class KeysDamaged(CoordinatorError):
    """The file of a key holds something else, or cannot be read."""


class NonFiniteState(CoordinatorError):
    """The algorithm's next state holds an infinite or undefined number."""


class BrokenAudit(CoordinatorError):
    """The audit log is not as it was written; the message names the first entry that is not."""


class UnknownDeviceId(CoordinatorError):
    """No device has the id that an operator named."""


class InvalidModel(CoordinatorError):
    """A model cannot be released, or rolled out, as an operator asked."""


class UnknownModel(CoordinatorError):
    """No model has that name in the population, or no such version was released."""


class TokenError(CoordinatorError):
    """A token is wrong, or may not do what was asked."""


class InvalidToken(TokenError):
    """A token's name, or the time for which it is good, cannot be."""


class UnknownToken(TokenError):
    """There is no such token to revoke."""


class BadToken(TokenError):
    """A token is unknown, revoked or expired."""


class RoleLacking(TokenError):
    """A token is good, and its role does not allow what was asked."""


class ForgedForm(RoleLacking):
    """A form was not sent from a page of the session that it came with."""


class InvalidBudget(CoordinatorError):
    """A privacy budget of a population cannot be, or is below what its tasks have spent."""


class InvalidTask(CoordinatorError):
    """The task's settings contradict each other, or do not fit the bundle. Its message is the first of its `sentences`,
    each of which names a setting."""

    def __init__(self, *sentences: str) -> None:
        super().__init__(*sentences[:1])
        self.sentences = sentences


class BudgetExceeded(InvalidTask):
    """The task, or the rounds that it would get, would exceed the privacy budget of its population."""


class UnknownTask(CoordinatorError):
    """No task has that id."""


class UnknownRound(CoordinatorError):
    """The task has no such round, or it was not committed."""


class NotPrivate(CoordinatorError):
    """The task promises no privacy, and so has no certificate."""


class WrongKind(CoordinatorError):
    """A task that asks a question has no model, and one that asks none has no answer."""


class TaskEnded(CoordinatorError):
    """The task is over, or not in a state that the operation starts from."""


class Refusal(CoordinatorError):
    """A refusal of a device's request: `slug` names the problem type, the message is its detail.

    retriable: whether the device may try again later, as the answer then says.
    """

    slug: ClassVar[str]
    retriable: ClassVar[bool]

    def __init_subclass__(cls, slug: str, *, retriable: bool = False) -> None:
        cls.slug, cls.retriable = slug, retriable


class MalformedMessage(Refusal, slug="malformed-message"):
    """The request is not a message of this protocol."""


class UnknownDevice(Refusal, slug="unknown-device"):
    """No device has this key id."""


class ReplayedSignature(Refusal, slug="replayed-signature"):
    """A request with this signature's nonce came before."""


class DeviceRevoked(Refusal, slug="device-revoked"):
    """An operator has revoked this device."""

    def __init__(self) -> None:
        super().__init__("the operator of this coordinator has revoked this device; it gets no more work")


class NotAttested(Refusal, slug="not-attested"):
    """The coordinator does not take this attestation."""


class ForeignSession(Refusal, slug="foreign-session"):
    """The session is another device's."""


class ForeignAssignment(Refusal, slug="foreign-assignment"):
    """The assignment is another device's."""


class UnknownPopulation(Refusal, slug="unknown-population"):
    """No population has this name."""


class UnknownSession(Refusal, slug="unknown-session"):
    """The session does not exist or has ended."""


class UnknownAssignment(Refusal, slug="unknown-assignment"):
    """No assignment has this id."""


class UnknownBlob(Refusal, slug="unknown-blob"):
    """No blob that devices may have has this digest."""


class NoModel(Refusal, slug="no-model"):
    """The device has no version of the model."""


class ConflictingReport(Refusal, slug="conflicting-report"):
    """Another report was already accepted for this assignment."""


class InvalidReport(Refusal, slug="invalid-report"):
    """The body is not a report of this assignment's layout."""


class UnusableMessage(Refusal, slug="unusable-message"):
    """The secure aggregation cannot use a device's message."""


class TooLarge(Refusal, slug="too-large"):
    """The body is larger than this address accepts."""


class RangeNotSatisfiable(Refusal, slug="range-not-satisfiable"):
    """The requested range lies outside the blob, which has `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the blob has {size} bytes")
        self.size = size


class MismatchingOffset(Refusal, slug="mismatching-offset"):
    """A part of a report does not begin where the last one ended: after `size` bytes."""

    def __init__(self, detail: str, size: int) -> None:
        super().__init__(detail)
        self.size = size


class NoLongerNeeded(Refusal, slug="no-longer-needed", retriable=True):
    """The round no longer needs this report."""


class TooStale(NoLongerNeeded, slug="too-stale", retriable=True):
    """The report starts from a model that is too old for the round."""


class Unavailable(Refusal, slug="unavailable", retriable=True):
    """The coordinator cannot serve this now."""


class TooManyRequests(Refusal, slug="too-many-requests", retriable=True):
    """The caller has asked too often; it is admitted again after `wait_s` seconds."""

    def __init__(self, detail: str, wait_s: float) -> None:
        super().__init__(detail)
        self.wait_s = wait_s
