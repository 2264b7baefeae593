"""Errors of the coordinator.

CoordinatorError
├── InvalidSettings         a setting of the service is unknown or has a wrong value
├── UnsupportedDatabase     the database URL names something this version cannot use, or reach
├── WrongRevision           the database's tables are not those that this version works with
├── UnsupportedBlobs        the address of the blobs names something this version cannot use
├── WrongBlobs              the blobs are not those of the database
├── UnreadableBlob          a blob that a task needs is missing or was altered
├── UnreadableTask          a stored task has a setting that this version does not know
├── MissingStore            there is no database, or no blob folder, where one was named
├── BeaconUnavailable       the enrolment authority drew no beacon for a secure round
├── LeaseLost               another replica drives a population that this one believed its own
├── KeysDiffer              the file of a key holds another key than the one that the store knows
├── KeysMissing             the file of a key that the store knows is not there
├── StoreConflict           a row is not in the state that this process believed: another one changed it
├── UnexpectedEvent         a state machine was handed an event that its state cannot take (a bug in the caller)
├── KeysDamaged             the file of a key holds something else, or cannot be read
├── NonFiniteState          the algorithm's next state holds an infinite or undefined number
├── BrokenAudit             the audit log is not as it was written
├── UnknownDeviceId         no device has the id that an operator named
├── TokenError
│   ├── InvalidToken        a token's name, or its time, cannot be
│   ├── UnknownToken        there is no such token to revoke
│   ├── BadToken            a token is none of this coordinator, was revoked or has expired
│   └── RoleLacking         a token is good, and its role does not allow what was asked
│       └── ForgedForm      a form was not sent from a page of the session that it came with
├── TaskError
│   ├── InvalidTask         the task's settings contradict each other, or do not fit the bundle
│   ├── UnknownTask         no task has that id
│   ├── UnknownRound        the task has no such round, or it was not committed
│   ├── NotPrivate          the task promises no privacy, and so has no certificate
│   └── TaskEnded           the task is over, or not in a state that the operation starts from
└── Refusal                 an answer to a device; each is one problem type of fedcore.wire.problems
    ├── MalformedMessage · UnknownPopulation · UnknownSession · UnknownAssignment · UnknownBlob
    ├── UnknownDevice · ReplayedSignature       (beside fedcore's RequestError, about a request's signature and body)
    ├── DeviceRevoked · NotAttested · ForeignSession · ForeignAssignment
    ├── ConflictingReport · MismatchingOffset · InvalidReport · UnusableMessage
    ├── TooLarge · RangeNotSatisfiable
    └── NoLongerNeeded (TooStale) · Unavailable · TooManyRequests   (each with a retry window)
"""

from __future__ import annotations

from typing import ClassVar


class CoordinatorError(Exception):
    """Base of every error raised by `coordinator`."""


class InvalidSettings(CoordinatorError):
    """A setting of the service is unknown or has a wrong value; the message names it and its source."""


class BeaconUnavailable(CoordinatorError):
    """The enrolment authority drew no beacon for a secure round: it cannot be reached, or refuses."""


class UnsupportedDatabase(CoordinatorError):
    """The database URL names something this version cannot use, or reach."""


class WrongRevision(CoordinatorError):
    """The database's tables are not those that this version works with."""


class UnsupportedBlobs(CoordinatorError):
    """The address of the blobs names something this version cannot use."""


class WrongBlobs(CoordinatorError):
    """The blobs are not those of the database."""


class UnreadableBlob(CoordinatorError):
    """A blob that a task needs is missing or was altered."""


class UnreadableTask(CoordinatorError):
    """A stored task has a setting, or a value of one, that this version does not know; the message names both."""


class MissingStore(CoordinatorError):
    """There is no database, or no blob folder, where one was named."""


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


class TokenError(CoordinatorError):
    """A token is wrong, or may not do what was asked."""


class InvalidToken(TokenError):
    """A token's name, or the time for which it is good, cannot be."""


class UnknownToken(TokenError):
    """There is no such token to revoke."""


class BadToken(TokenError):
    """A token is none of this coordinator, was revoked or has expired."""


class RoleLacking(TokenError):
    """A token is good, and its role does not allow what was asked."""


class ForgedForm(RoleLacking):
    """A form was not sent from a page of the session that it came with."""


class TaskError(CoordinatorError):
    """An operator asked for something that cannot be done to a task."""


class InvalidTask(TaskError):
    """The task's settings contradict each other, or do not fit the bundle."""


class UnknownTask(TaskError):
    """No task has that id."""


class UnknownRound(TaskError):
    """The task has no such round, or it was not committed."""


class NotPrivate(TaskError):
    """The task promises no privacy, and so has no certificate."""


class TaskEnded(TaskError):
    """The task is over, or not in a state that the operation starts from."""


class Refusal(CoordinatorError):
    """A refusal of a device's request: `slug` names the problem type, the message is its detail."""

    slug: ClassVar[str]
    retriable: ClassVar[bool] = False


class MalformedMessage(Refusal):
    """The request is not a message of this protocol."""

    slug = "malformed-message"


class UnknownDevice(Refusal):
    """No device has this key id."""

    slug = "unknown-device"


class ReplayedSignature(Refusal):
    """A request with this signature's nonce came before."""

    slug = "replayed-signature"


class DeviceRevoked(Refusal):
    """An operator has revoked this device."""

    slug = "device-revoked"

    def __init__(self) -> None:
        super().__init__("the operator of this coordinator has revoked this device; nothing is asked of it any more")


class NotAttested(Refusal):
    """The coordinator does not take this attestation."""

    slug = "not-attested"


class ForeignSession(Refusal):
    """The session is another device's."""

    slug = "foreign-session"


class ForeignAssignment(Refusal):
    """The assignment is another device's."""

    slug = "foreign-assignment"


class UnknownPopulation(Refusal):
    """No population has this name."""

    slug = "unknown-population"


class UnknownSession(Refusal):
    """The session does not exist or has ended."""

    slug = "unknown-session"


class UnknownAssignment(Refusal):
    """No assignment has this id."""

    slug = "unknown-assignment"


class UnknownBlob(Refusal):
    """No blob that devices may have has this digest."""

    slug = "unknown-blob"


class ConflictingReport(Refusal):
    """Another report was already accepted for this assignment."""

    slug = "conflicting-report"


class InvalidReport(Refusal):
    """The body is not a report of this assignment's layout."""

    slug = "invalid-report"


class UnusableMessage(Refusal):
    """The secure aggregation cannot use a device's message."""

    slug = "unusable-message"


class TooLarge(Refusal):
    """The body is larger than this address accepts."""

    slug = "too-large"


class RangeNotSatisfiable(Refusal):
    """The requested range lies outside the blob, which has `size` bytes."""

    slug = "range-not-satisfiable"

    def __init__(self, size: int) -> None:
        super().__init__(f"the blob has {size} bytes")
        self.size = size


class MismatchingOffset(Refusal):
    """A part of a report does not begin where the last one ended: after `size` bytes."""

    slug = "mismatching-offset"

    def __init__(self, detail: str, size: int) -> None:
        super().__init__(detail)
        self.size = size


class NoLongerNeeded(Refusal):
    """The round no longer needs this report."""

    slug = "no-longer-needed"
    retriable = True


class TooStale(NoLongerNeeded):
    """The report starts from a model that is too old for the round."""

    slug = "too-stale"


class Unavailable(Refusal):
    """The coordinator cannot serve this now."""

    slug = "unavailable"
    retriable = True


class TooManyRequests(Refusal):
    """The caller has asked too often; it is admitted again after `wait_s` seconds."""

    slug = "too-many-requests"
    retriable = True

    def __init__(self, detail: str, wait_s: float) -> None:
        super().__init__(detail)
        self.wait_s = wait_s
