"""The time at which a task starts, in seconds since 1970. The rules have no calendar."""

from __future__ import annotations

from datetime import datetime

from coordinator.errors import InvalidTask
from coordinator.rules.task_settings import TIME, TaskSettings


def start_of(settings: TaskSettings) -> float:
    """When a task with these settings starts; 0 where nothing says so. Raises InvalidTask for a day that is none."""
    if settings.starts_at is None:
        return 0.0
    try:
        return datetime.fromisoformat(settings.starts_at).timestamp()
    except ValueError as error:
        raise InvalidTask(f"starts_at must be {TIME}, not {settings.starts_at!r}: {error}") from error
