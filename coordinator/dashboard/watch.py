"""Alerts of this process: tasks that need somebody, certificates that expire, and disks that fill up."""

from __future__ import annotations

import shutil
from pathlib import Path

from cryptography import x509

from coordinator.rules.alerts import Alert, of_disk, of_expiry, of_tasks, of_unreadable
from coordinator.rules.states import TaskState
from coordinator.settings import Settings
from coordinator.store.database_engines import sqlite_path
from coordinator.store.records.records import Records
from fedcore.release import decode_release


def alerts(records: Records, settings: Settings) -> list[Alert]:
    """All alerts, those of tasks first."""
    tasks = records.tasks(TaskState.ACTIVE, TaskState.PAUSED)
    alerts_ = of_tasks(zip(tasks, records.progress(tasks), strict=True))
    for task in tasks:
        if task.release is not None:
            expires_at = decode_release(task.release.text).expires_at
            alerts_ += of_expiry("the release", expires_at, records.at, task)
    if settings.tls_cert is not None:
        alerts_ += _certificate(settings.tls_cert, records.at)
    return alerts_ + _disks(settings)


def _certificate(path: Path, now: float) -> list[Alert]:
    """Of the file as it is now, which may be another one than at the start."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        return [of_unreadable(f"the TLS certificate {path}", error)]
    return of_expiry("the TLS certificate", certificate.not_valid_after_utc.timestamp(), now)


def _disks(settings: Settings) -> list[Alert]:
    """Of the folders that are on this machine; object stores and database servers have their own monitoring."""
    places = {"the blobs": Path(settings.blobs), "the database": sqlite_path(settings.database)}
    alerts_ = []
    for name, place in places.items():
        if place is not None and place.exists():
            usage = shutil.disk_usage(place)
            alerts_ += of_disk(name, usage.free, usage.total)
    return alerts_
