"""Message types of the protocol, by their numbers. Spec: docs/spec/secagg.md §4."""

from __future__ import annotations

from enum import IntEnum

from secagg.errors import Malformed


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
