"""Phases of a session at the server, and the result of a phase's end. Spec: docs/spec/secagg.md §7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from secagg.message_type import MessageType
from secagg.unmasking import Unmasking


class SessionPhase(IntEnum):
    """A phase of a session, named by the message that is due: a device's, or the server's own if it waits for none."""

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

    messages: the next message by slot, for the remaining devices. roster: at the end of advertising, the hashes of its
    leaves, for which the authority draws the beacon; empty if none is needed. unmasking: at the end of the session, the
    work that computes the sum.
    """

    messages: Mapping[int, bytes] = field(default_factory=dict)
    roster: tuple[bytes, ...] = ()
    unmasking: Unmasking | None = None
