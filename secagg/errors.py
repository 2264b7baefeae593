"""Errors of secure aggregation. Any of them ends a session for the device that meets it.

Spec: docs/spec/secagg.md §6, §7.

SecaggError
├── Malformed                 bytes are not the one encoding of a message
├── WrongSession              a message belongs to another session
├── OutOfOrder                a step is not due, or the session is over
├── BadInput                  the host's own vector or weight cannot be summed
├── InvitationRefused         a device does not accept an invitation
│   ├── UnsupportedSuite      the version or suite is unknown
│   ├── ReplayedRound         the device has answered for this round or a later one
│   ├── PolicyViolation       cohort, parameters or mode are weaker than the device's policy allows
│   ├── HeadroomError         a field cannot hold the sum
│   └── ModelMismatch         the model or layout is not the one that the device holds
├── Forged                    a message that no honest party can have made
│   ├── BadSignature          a signature or credential is not its signer's
│   ├── ExpiredCredential     a credential ends before the session does
│   ├── BadPoint              a public key is not a good point of the curve
│   ├── DuplicateKey          one id or key occurs twice
│   ├── BadCiphertext         a box of shares does not open
│   ├── GraphMismatch         neighbours are not those that the roster implies
│   └── SelfMismatch          the roster does not hold this device as it is
├── TooFewNeighbours          fewer neighbours are left than shares are needed
├── BelowThreshold            fewer devices are left than a sum must have
├── SelfMarkedDead            a device that takes part is listed as gone
├── InconsistentSurvivors     there are two sets of survivors
├── AlreadyRevealed           a share was revealed, and another is asked for
└── Unsummable                the server cannot use a message of a device, or the sum
    ├── BadVector             an upload has another length, or no good signature
    ├── DuplicateUpload       a device sends a message of a kind twice
    ├── BadShare              a share is of the wrong kind, or does not give the secret it should
    ├── UnmaskCheckFailed     the sum does not fit its check word
    └── SumOutOfRange         the sum is more than its devices may have sent
"""

from __future__ import annotations

from collections.abc import Iterable


class SecaggError(Exception):
    """Base of every error raised by `secagg`. `culprits` are the roster positions of the devices to blame, if known."""

    def __init__(self, message: str, culprits: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.culprits = tuple(culprits)


class Malformed(SecaggError):
    """Bytes are not the one encoding of a message."""


class WrongSession(SecaggError):
    """A message belongs to another session."""


class OutOfOrder(SecaggError):
    """A step is not due, or the session is over."""


class BadInput(SecaggError):
    """The host's own vector or weight cannot be summed."""


class InvitationRefused(SecaggError):
    """A device does not accept an invitation."""


class UnsupportedSuite(InvitationRefused):
    """The version or suite is unknown."""


class ReplayedRound(InvitationRefused):
    """The device has answered for this round or a later one."""


class PolicyViolation(InvitationRefused):
    """Cohort, parameters or mode are weaker than the device's policy allows."""


class HeadroomError(InvitationRefused):
    """A field cannot hold the sum."""


class ModelMismatch(InvitationRefused):
    """The model or layout is not the one that the device holds."""


class Forged(SecaggError):
    """A message that no honest party can have made."""


class BadSignature(Forged):
    """A signature or credential is not its signer's."""


class ExpiredCredential(Forged):
    """A credential ends before the session does."""


class BadPoint(Forged):
    """A public key is not a good point of the curve."""


class DuplicateKey(Forged):
    """One id or key occurs twice."""


class BadCiphertext(Forged):
    """A box of shares does not open; `culprits` holds its sender."""


class GraphMismatch(Forged):
    """Neighbours are not those that the roster implies."""


class SelfMismatch(Forged):
    """The roster does not hold this device as it is."""


class TooFewNeighbours(SecaggError):
    """Fewer neighbours are left than shares are needed."""


class BelowThreshold(SecaggError):
    """Fewer devices are left than a sum must have."""


class SelfMarkedDead(SecaggError):
    """A device that takes part is listed as gone."""


class InconsistentSurvivors(SecaggError):
    """There are two sets of survivors. `evidence` holds the (digest, signature) of two devices that saw them."""

    def __init__(
        self, message: str, culprits: Iterable[int] = (), evidence: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(message, culprits)
        self.evidence = tuple(evidence)


class AlreadyRevealed(SecaggError):
    """A share was revealed, and another is asked for."""


class Unsummable(SecaggError):
    """The server cannot use a message of a device, or the sum."""


class BadVector(Unsummable):
    """An upload has another length, or no good signature."""


class DuplicateUpload(Unsummable):
    """A device sends a message of a kind twice."""


class BadShare(Unsummable):
    """A share is of the wrong kind, or does not give the secret it should; `culprits` sent it."""


class UnmaskCheckFailed(Unsummable):
    """The sum does not fit its check word."""


class SumOutOfRange(Unsummable):
    """The sum is more than its devices may have sent: at least one of them sent a value out of range."""
