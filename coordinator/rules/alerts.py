"""Alerts for operators: tasks that need somebody, certificates that expire or are no good, and full disks. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from coordinator.rules.entities import Task
from coordinator.rules.progress import Progress, Reason

_DAY_S = 86_400.0
EXPIRES_WITHIN_S = 14 * _DAY_S
"""How long before an expiry the alert begins."""
LEAST_FREE, LEAST_FREE_BYTES = 0.1, 1 << 30
"""The share of a disk, or the bytes, below which it counts as full soon."""


class AlertKind(StrEnum):
    """What an alert is about."""

    DIVERGED = "diverged"
    TOO_FEW_DEVICES = "too few devices"
    STUCK = "stuck"
    EXPIRES = "expires"
    UNREADABLE = "unreadable"
    DISK = "disk"


class Alert(NamedTuple):
    """Something that an operator should look at.

    task: what it is about; None where it is about no task. remedy: what to do, where the sentence does not say it.
    """

    kind: AlertKind
    sentence: str
    task: Task | None = None
    remedy: str = ""


_FEW = {Reason.TOO_FEW_DEVICES, Reason.NO_DEVICES, Reason.NONE_ELIGIBLE}
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


def of_tasks(tasks: Iterable[tuple[Task, Progress]]) -> list[Alert]:
    """An alert for every task that is stalled, unless an operator paused it."""
    alerts = []
    for task, progress in tasks:
        if progress.stalled and progress.reason not in _WANTED:
            kind = AlertKind.TOO_FEW_DEVICES if progress.reason in _FEW else AlertKind.STUCK
            kind = AlertKind.DIVERGED if progress.reason is Reason.DIVERGED else kind
            alerts.append(Alert(kind, progress.sentence, task, _REMEDIES[progress.reason]))
    return alerts


def of_expiry(what: str, expires_at: float, now: float, task: Task | None = None) -> list[Alert]:
    """An alert when something, such as "the TLS certificate", has expired or will soon; times in seconds since 1970."""
    left_s = expires_at - now
    if left_s > EXPIRES_WITHIN_S:
        return []
    when = f"expires in {max(0.0, left_s) / _DAY_S:.1f} days" if left_s > 0 else "has expired"
    return [Alert(AlertKind.EXPIRES, f"{what} {when}: renew it", task)]


def of_unreadable(what: str, why: Exception) -> Alert:
    """The alert when something, such as "the TLS certificate", cannot be read."""
    return Alert(AlertKind.UNREADABLE, f"{what} cannot be read: {why}; put a good one there")


def of_disk(place: str, free_bytes: int, total_bytes: int) -> list[Alert]:
    """An alert when the disk of a place is nearly full."""
    if free_bytes >= LEAST_FREE_BYTES and free_bytes >= LEAST_FREE * total_bytes:
        return []
    words = f"{free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are free where {place} are: make room"
    return [Alert(AlertKind.DISK, words)]
