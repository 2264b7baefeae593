"""Phases of a session at the server, and what the end of one gives. Spec: docs/spec/secagg.md §7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from secagg.message_type import MessageType
from secagg.unmasking import Unmasking


class SessionPhase(IntEnum):
    """A phase of a session, by the message that is due: a device's, or the server's own when it waits for none."""

    ADVERTISING = MessageType.ADVERTISE
    DRAWING = MessageType.ROSTER
    SHARING = MessageType.SHARES
    OPENING = MessageType.COMPLAINTS
    UPLOADING = MessageType.MASKED
    CONFIRMING = MessageType.CONFIRM
    REVEALING = MessageType.UNMASK
    OVER = MessageType.RESULT

    @property
    def due(self) -> MessageType:
        """The message that is due."""
        return MessageType(self)

    @property
    def then(self) -> MessageType:
        """The server's message at its end."""
        return MessageType.ROSTER if self is SessionPhase.DRAWING else MessageType(self + 1)


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """The end of a phase.

    messages: the next message by slot, to the devices that are still there. roster: at the end of advertising, the
    hashes of its leaves, for which the authority draws the beacon; empty where none is drawn. unmasking: the work that
    gives the sum, at the end of the session.
    """

    messages: Mapping[int, bytes] = field(default_factory=dict)
    roster: tuple[bytes, ...] = ()
    unmasking: Unmasking | None = None
