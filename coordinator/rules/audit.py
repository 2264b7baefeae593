"""The audit log: what operators, tokens and devices did, each entry chained to the one before by its hash. Pure.

An entry's hash is SHA-256 over its fields and the hash before it. So to change, remove or move an entry is to break the
chain there, unless all that follows is made anew; a head that was saved elsewhere shows that, and shows a cut end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from coordinator.errors import BrokenAudit

_PAGE = 1000
STORE = "an operator on the store"
"""The name in the history for changes without the admin API, by somebody who may write the coordinator's files."""


class Action(StrEnum):
    """What was done."""

    TASK_CREATED = "task-created"
    TASK_PAUSED = "task-paused"
    TASK_RESUMED = "task-resumed"
    TASK_CANCELLED = "task-cancelled"
    TASK_ROLLED_BACK = "task-rolled-back"
    BUDGET_SET = "budget-set"
    BUDGET_REMOVED = "budget-removed"
    MODEL_READ = "model-read"
    ANSWER_READ = "answer-read"
    CERTIFICATE_READ = "certificate-read"
    MODEL_RELEASED = "model-released"
    MODEL_PROMOTED = "model-promoted"
    MODEL_ROLLED_BACK = "model-rolled-back"
    TOKEN_MADE = "token-made"  # noqa: S105 - a name, no secret
    TOKEN_REVOKED = "token-revoked"  # noqa: S105 - a name, no secret
    KEYS_CHANGED = "keys-changed"
    DEVICE_ENROLLED = "device-enrolled"
    DEVICE_REVOKED = "device-revoked"
    DEVICE_ALLOWED = "device-allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One entry: `number` counts from 1 without gaps, `at` is in seconds since 1970, `actor` did `action` to `subject`.

    sha256: the entry's hash, hex.
    """

    number: int
    at: float
    actor: str
    action: str
    subject: str
    detail: str
    sha256: str

    def chained(self, previous: str) -> str:
        """The hash that the entry has after one with the hash `previous`; "" before the first."""
        fields = (previous, self.number, self.at, self.actor, self.action, self.subject, self.detail)
        return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()


@dataclass(frozen=True, slots=True)
class Head:
    """The last entry of a log: its number, 0 for none, and its hash. To be saved where the log's writers cannot."""

    number: int = 0
    sha256: str = ""

    def __str__(self) -> str:
        return f"{self.number}:{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """The head of a text that `str` made. Raises BrokenAudit."""
        number, _, sha256 = text.strip().partition(":")
        if not number.isdecimal() or len(number) > 18:
            raise BrokenAudit(f"{text.strip()[:80]!r} is not the head of an audit log, which looks like 12:0a1b…")
        return cls(int(number), sha256)


def verify(entries: Iterable[AuditEntry], saved: Head | None = None) -> Head:
    """The head of a whole log, given in order. saved: a head that it had before.

    Raises BrokenAudit, which names the first entry that is not as it was written.
    """
    head = Head()
    for entry in entries:
        if entry.number != head.number + 1:
            raise BrokenAudit(f"entry {head.number + 1} of the audit log is missing: entry {entry.number} follows")
        if entry.sha256 != entry.chained(head.sha256):
            raise BrokenAudit(f"entry {entry.number} of the audit log was changed or moved: its hash does not follow")
        head = Head(entry.number, entry.sha256)
        if saved is not None and saved.number == head.number and saved != head:
            raise BrokenAudit(
                f"entry {head.number} of the audit log is not the one of the saved head: it was made anew"
            )
    if saved is not None and saved.number > head.number:
        gone = f"entry {head.number + 1} of the audit log is missing, and all after it"
        raise BrokenAudit(f"{gone}: its saved head is entry {saved.number}")
    return head


def whole_log(read: Callable[[int, int], list[AuditEntry]]) -> Iterator[AuditEntry]:
    """Every entry from the first. `read` gives those after a number, as many as the second number says at most."""
    after = 0
    while page := read(after, _PAGE):
        yield from page
        after = page[-1].number
