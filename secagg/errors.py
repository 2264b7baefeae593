"""Errors of secure aggregation, any of which ends a session for the device that meets it; and encodings.

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

from collections.abc import Iterable, Iterator
from enum import IntEnum


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


# Encodings: message types, fields taken from the front, bitmaps, heads. Spec: docs/spec/secagg.md §1, §4.


class MessageType(IntEnum):
    """The number of a message, which is its first byte. Devices send the odd ones, and the server the others."""

    INVITE = 0
    ADVERTISE = 1
    ROSTER = 2
    SHARES = 3
    DELIVER = 4
    COMPLAINTS = 5
    INCLUDED = 6
    MASKED = 7
    SURVIVORS = 8
    CONFIRM = 9
    CONFIRMATIONS = 10
    UNMASK = 11
    RESULT = 12

    @classmethod
    def of(cls, message: bytes) -> MessageType:
        """The type of a message. Raises Malformed when it has none."""
        if not message or message[0] > cls.RESULT:
            raise Malformed(f"a message with head {message[:2].hex() or '(empty)'} does not exist")
        return cls(message[0])


DEVICE_MESSAGES = tuple(number for number in MessageType if number % 2)
"""The messages that devices send."""


VERSION = 1
DIGEST_BYTES = 32


class Reader:
    """A reader that takes fields from the front of a message, and refuses bytes that are missing.

    As a context, it also refuses bytes that are left over at the end of the block.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._data, self._at, self._name = data, 0, name

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        end = self._at + size
        if end > len(self._data):
            raise Malformed(f"{self._name} ends after {len(self._data)} bytes, in a field that goes to {end}")
        part = self._data[self._at : end]
        self._at = end
        return part

    def integer(self, size: int) -> int:
        """The next unsigned integer of that many bytes."""
        return int.from_bytes(self.take(size), "little")

    def bitmap(self, n: int) -> frozenset[int]:
        """The positions whose bits are set."""
        return read_bitmap(self.take(-(-n // 8)), n)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._at != len(self._data):
            raise Malformed(f"{self._name} has {len(self._data) - self._at} bytes too many")


def bitmap(positions: frozenset[int], n: int) -> bytes:
    """A set of positions below n as bits, the least significant first."""
    data = bytearray(-(-n // 8))
    for position in positions:
        data[position // 8] |= 1 << position % 8
    return bytes(data)


def read_bitmap(data: bytes, n: int) -> frozenset[int]:
    """The positions in a bitmap of n bits."""
    if n % 8 and data[-1] >> n % 8:
        raise Malformed(f"a bitmap of {n} positions names others")
    return frozenset(position for position in range(n) if data[position // 8] >> position % 8 & 1)


def open_message(data: bytes, number: MessageType, name: str, session: bytes | None = None) -> Reader:
    """A reader behind the head of message `number`. Raises Malformed, UnsupportedSuite, WrongSession."""
    reader = Reader(data, name)
    actual, version = reader.take(2)
    if actual != number:
        raise Malformed(f"message M{actual} came instead of M{number}, {name}")
    if version != VERSION:
        raise UnsupportedSuite(f"{name} has version {version}; this end speaks {VERSION}: update the older end")
    if session is not None and reader.take(DIGEST_BYTES) != session:
        raise WrongSession(f"{name} belongs to another session: it is late, or the other end holds another roster")
    return reader


def head(number: MessageType, session: bytes = b"") -> bytes:
    """The head that every message begins with."""
    return bytes([number, VERSION]) + session


def ascending(reader: Reader, count: int) -> Iterator[int]:
    """The positions at the start of `count` entries; the caller reads the other fields. Positions must ascend."""
    last = -1
    for _ in range(count):
        position = reader.integer(4)
        if position <= last:
            raise Malformed("positions do not ascend")
        last = position
        yield position
