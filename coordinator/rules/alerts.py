"""The audit log, chained by hashes, and alerts for operators, with the assumptions of the threat model. Pure.

A *finding* is what needs somebody now; an *alert* is its row, raised once and cleared once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import msgspec

from coordinator.errors import BrokenAudit
from coordinator.rules.entities import Task
from coordinator.rules.progress import DRIVER_SILENT_S, Progress, Reason

# The audit log: what operators, tokens and devices did, each entry chained to the one before by its hash. Pure.
#
# An entry's hash is SHA-256 over its fields and the hash before it. So to change, remove or move an entry is to break
# the chain there, unless all that follows is made anew; a head that was saved elsewhere shows that, and shows a cut
# end.


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

    population: of the subject; None where it belongs to none. sha256: the entry's hash, hex.
    """

    number: int
    at: float
    actor: str
    action: str
    subject: str
    detail: str
    population: str | None = None
    sha256: str

    def chained(self, previous: str) -> str:
        """The hash that the entry has after one with the hash `previous`; "" before the first."""
        fields = (previous, self.number, self.at, self.actor, self.action, self.subject, self.detail, self.population)
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


# Alerts for operators, and the assumptions of the threat model that are judged. Pure.


class Assumption(msgspec.Struct, frozen=True, kw_only=True):
    """An assumption, whether it holds (None: not seen from here), what was found, and how to make it hold."""

    name: str
    holds: bool | None
    found: str
    remedy: str = ""


EXPIRES_WITHIN_S = 14 * 86_400.0
"""How long before an expiry the alert begins."""
LEAST_FREE, LEAST_FREE_BYTES = 0.1, 1 << 30
"""The share of a disk, or the bytes, below which it counts as full soon."""
CLEARED_AFTER_S = 60.0
"""How long an alert must not be found before it is cleared: what comes and goes, or a restart, is one alert."""

_LONGEST_TEXT = 1000
"""Characters of a text. That of an exception may be long, and no event may be more than its receiver takes."""


class AlertKind(StrEnum):
    """What an alert is about, where it is not a task that is stalled: that has its reason as its kind."""

    EXPIRES = "expires"
    UNREADABLE = "unreadable"
    DISK = "disk-full"
    UNWATCHED = "unwatched"
    TEST = "test"


Key: TypeAlias = tuple[str, str | None, str]
"""Kind, task and subject: there is one open alert of each."""


class Finding(NamedTuple):
    """Something that an operator should look at.

    kind: of AlertKind, or a Reason. task: what it is about; None where it is about no task. subject: more of that, such
    as "the release". remedy: what to do, where the text does not say it.
    """

    kind: str
    text: str
    task: Task | None = None
    subject: str = ""
    remedy: str = ""

    @property
    def key(self) -> Key:
        """What the alert of this is found by."""
        return self.kind, None if self.task is None else self.task.id, self.subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert, with the text and the remedy of when it was raised. Times in seconds since 1970.

    task, task_name, population: None where it is about no task. cleared_at: None while it is open.
    """

    id: str
    kind: str
    population: str | None = None
    task: str | None = None
    task_name: str | None = None
    subject: str = ""
    text: str
    remedy: str = ""
    raised_at: float
    cleared_at: float | None = None

    @property
    def key(self) -> Key:
        """What a finding has in common with it."""
        return self.kind, self.task, self.subject


class AlertEvent(NamedTuple):
    """That an alert was raised, or else cleared."""

    alert: Alert
    cleared: bool

    @property
    def word(self) -> str:
        """What happened."""
        return "cleared" if self.cleared else "raised"

    @property
    def id(self) -> str:
        """That of no other event."""
        return f"{self.alert.id}-{self.word}"

    @property
    def body(self) -> dict[str, Any]:
        """The event for a webhook: the same at every try."""
        names = ("kind", "population", "task", "task_name", "text", "remedy", "raised_at")
        same = {name: getattr(self.alert, name) for name in names}
        cleared_at = self.alert.cleared_at if self.cleared else None
        return {"id": self.id, "event": self.word, "alert": self.alert.id, **same, "cleared_at": cleared_at}


class AlertChanges(NamedTuple):
    """Alerts to raise and to clear. absent: since when open ones that are not cleared yet were not found, by id."""

    raised: list[Finding]
    cleared: list[Alert]
    absent: dict[str, float]


class Watcher(NamedTuple):
    """The replica that evaluates alerts: that which drives the oldest population. None: no replica does.

    seen_at: its last beat, in seconds since 1970.
    """

    population: str
    replica: str | None
    seen_at: float | None


def alert_changes(
    open_: Sequence[Alert], found: Iterable[Finding], absent: Mapping[str, float], now: float
) -> AlertChanges:
    """The changes to the open alerts after a look that found these; `absent` as the look before gave it."""
    findings, there = {finding.key: finding for finding in found}, {alert.key for alert in open_}
    raised = [finding for key, finding in findings.items() if key not in there]
    gone = [alert for alert in open_ if alert.key not in findings]
    since = {alert.id: absent.get(alert.id, now) for alert in gone}
    cleared = [alert for alert in gone if now - since[alert.id] >= CLEARED_AFTER_S]
    for alert in cleared:
        del since[alert.id]
    return AlertChanges(raised, cleared, since)


def unwatched(watcher: Watcher | None, now: float) -> list[Alert]:
    """The alert that no coordinator evaluates alerts. It has no row, since nobody would write it."""
    if watcher is None or (watcher.seen_at is not None and now - watcher.seen_at <= DRIVER_SILENT_S):
        return []
    return [
        Alert(
            id=AlertKind.UNWATCHED,
            kind=AlertKind.UNWATCHED,
            text=f"no coordinator drives population {watcher.population}, so none looks for alerts: others here "
            "may be over, and new ones are missing",
            remedy=_REMEDIES[Reason.NO_DRIVER],
            raised_at=now if watcher.seen_at is None else watcher.seen_at,
        )
    ]


_WANTED = {Reason.PAUSED}
"""Stalled because an operator wants it."""
_REMEDIES = {
    Reason.PAUSED_AFTER_FAILURES: "its rounds say why devices gave up; mend that, and resume the task",
    Reason.DIVERGED: "lower learning rates need a new task",
    Reason.NO_DRIVER: "start a coordinator with a role that drives, and look at its log",
    Reason.DRIVER_SILENT: "look whether it runs and reaches the database, and start it again",
    Reason.BACK_OFF: "its rounds say why attempts failed; do nothing if that was passing",
    Reason.NO_DEVICES: "look whether devices are on, reach this coordinator, and may take part by their own rules",
    Reason.NONE_ELIGIBLE: "wait until devices have rested, or make a task with looser settings",
    Reason.TOO_FEW_DEVICES: "wait for devices, or make a task with a lower goal or a longer selection_timeout_s",
    Reason.DEVICES_SILENT: "wait: they are lost soon, and others are drawn; look at the network if it happens often",
    Reason.CANNOT_WRITE: "mend the database or the place of the blobs",
}


def of_tasks(tasks: Iterable[tuple[Task, Progress]]) -> list[Finding]:
    """A finding for every task that is stalled, unless an operator paused it.

    Devices that do not come are missed once in a population, by its first task.
    """
    found, missed = list[Finding](), set[str]()
    for task, progress in tasks:
        if not progress.stalled or progress.reason in _WANTED:
            continue
        where = task.settings.population if progress.reason is Reason.NO_DEVICES else ""
        if where not in missed:
            found.append(Finding(progress.reason, _shortened(progress.sentence), task, "", _REMEDIES[progress.reason]))
        missed |= {where} - {""}
    return found


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def of_expiry(what: str, expires_at: float, when: str, now: float, task: Task | None = None) -> list[Finding]:
    """A finding when something, such as "the TLS certificate", has expired or will soon.

    expires_at, now: seconds since 1970. when: `expires_at` as people read it.
    """
    left_s = expires_at - now
    if left_s > EXPIRES_WITHIN_S:
        return []
    does = "expires" if left_s > 0 else "has expired"
    return [Finding(AlertKind.EXPIRES, f"{what} {does}, {when}: renew it", task, what)]


def of_unreadable(what: str, place: object, why: Exception, remedy: str) -> Finding:
    """The finding when something, such as "the TLS certificate", cannot be read."""
    return Finding(AlertKind.UNREADABLE, f"{what} {place} cannot be read: {why}", subject=what, remedy=remedy)


def of_disk(place: str, free_bytes: int, total_bytes: int) -> list[Finding]:
    """A finding when the disk of a place is nearly full."""
    if free_bytes >= LEAST_FREE_BYTES and free_bytes >= LEAST_FREE * total_bytes:
        return []
    words = f"{free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are free where {place} are: make room"
    return [Finding(AlertKind.DISK, words, subject=place)]
