"""Values that the pages of rounds show: rows in, no HTML."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from coordinator.dashboard.times import clock
from coordinator.rules.entities import RoundRecord, Task
from coordinator.rules.figures import means_of
from coordinator.rules.states import RoundState
from coordinator.store.records.records import Records
from coordinator.store.rows import round_of
from fedcore.params import FLOAT_BYTES
from fedcore.plan import Plan

PAGE = 25
"""Attempts on a page."""
_PERCENTILES = (10, 50, 90, 100)


class Phase(NamedTuple):
    """A state that a round was in: when it began, how long it took, and its place on a time line, in hundredths."""

    name: str
    began: str
    seconds: float
    start: float
    width: float


class RoundPage(NamedTuple):
    """All that the page of an attempt at a round shows.

    outcomes: assignments by state and reason. percentiles: hundredths of the reports, and the seconds that none of them
    took longer, from its assignment on. up, down: bytes of a report, and of the checkpoint that each device fetches;
    None where that is not known.
    """

    task: Task
    attempt: RoundRecord
    phases: tuple[Phase, ...]
    outcomes: tuple[tuple[str, int], ...]
    percentiles: tuple[tuple[int, float], ...]
    up: int | None
    down: int | None


def attempts(records: Records, task_id: str, most: int = PAGE, before: int | None = None) -> tuple[RoundRecord, ...]:
    """The newest attempts of a task that ended, newest first; those before the row `before`."""
    return tuple(round_of(row, {}) for row in records.overview.latest(task_id, most, before))


def rounds_page(records: Records, task_id: str, before: int | None) -> dict[str, Any]:
    """A page of all attempts of a task; `older` is where the next one begins. Raises UnknownTask."""
    task, newest = records.task(task_id), attempts(records, task_id, PAGE + 1, before)
    shown = newest[:PAGE]
    metrics = sorted({name for attempt in shown for name in means_of(task.algorithm.name, attempt.metrics)})
    older = shown[-1].id if len(newest) > PAGE else None
    return {"task": task, "attempts": shown, "metrics": metrics, "older": older, "before": before}


def round_page(records: Records, plan: Plan, task_id: str, number: int, attempt: int) -> RoundPage:
    """The page of an attempt at a round of a task with this plan. Raises UnknownTask or UnknownRound."""
    task, row = records.task(task_id), records.overview.attempt(task_id, number, attempt)
    times = records.overview.report_times(row.id)
    report = plan.of_round(number).report
    up = None if task.settings.secagg is not None else report.size * FLOAT_BYTES
    return RoundPage(
        task=task,
        attempt=round_of(row, {}),
        phases=_phases(records, row),
        outcomes=tuple(
            (f"{state}: {reason}" if reason else state, count)
            for state, reason, count in records.overview.outcomes(row.id)
        ),
        percentiles=tuple((share, float(np.percentile(times, share))) for share in _PERCENTILES if times),
        up=up,
        down=_checkpoint_bytes(records, task, number),
    )


def _checkpoint_bytes(records: Records, task: Task, number: int) -> int | None:
    """The size of what devices fetch at the start of a round; None once that model is no longer kept."""
    committed = [task.initial.checkpoint_sha256] if number == 1 else records.overview.checkpoints(task.id, number - 1)
    return next(iter(records.overview.sizes(committed).values()), None)


def _phases(records: Records, row: Any) -> tuple[Phase, ...]:
    entered = records.overview.phases(row.id)
    ends = [*(at for _, at in entered[1:]), None]
    over = row.ended_at if row.ended_at is not None else records.at
    whole = max(over - entered[0][1], 1e-9) if entered else 1.0
    phases = []
    for (name, at), until in zip(entered, ends, strict=True):
        if RoundState(name).ended:
            continue
        seconds = max(0.0, (over if until is None else until) - at)
        phases.append(Phase(name, clock(at), seconds, 100 * (at - entered[0][1]) / whole, 100 * seconds / whole))
    return tuple(phases)
