"""Rows as values: tasks with their settings, rounds and assignments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import Row

from coordinator.errors import InvalidTask, UnreadableTask
from coordinator.rules.entities import AssignmentRecord, Evaluates, RegularEvaluation, RoundRecord, Snapshot, Task
from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.rules.task_settings import TaskSettings
from fedcore.bundle import AlgorithmRef
from fedcore.decoding import converter
from fedcore.plan import PlanSignature
from fedcore.release import Signed
from fedcore.validation import build

COUNTS = ("assigned", "reported", "aborted", "lost", "expired", "stale", "taken_over", "handed_on")
"""Of a round's assignments, as its value and its row have them; once it is over, the rest were not needed."""
_NEWER = "a newer version may have written them: upgrade this coordinator. Nothing was changed"
_plan_signature, _statement, _evaluates = converter(PlanSignature), converter(Signed), converter(Evaluates)
_evaluation = converter(RegularEvaluation)


def task_of(row: Row[Any]) -> Task:
    """The task of a row."""
    evaluates = None if row.evaluates is None else _evaluates(row.evaluates)
    lineage = None if evaluates is None else evaluates.lineage
    return Task(
        id=row.id,
        name=row.name,
        bundle=row.bundle,
        state=TaskState(row.state),
        reason=row.reason,
        settings=settings_of(row.id, row.population, row.settings),
        algorithm=AlgorithmRef(row.algorithm, row.algorithm_settings),
        plan_sha256=row.plan_sha256,
        plan_signature=None if row.plan_signature is None else _plan_signature(row.plan_signature),
        certificate_sha256=row.certificate_sha256,
        release=signed_of(row.release),
        initial=Snapshot(0, row.state_sha256, row.checkpoint_sha256, lineage),
        created_at=row.created_at,
        evaluates=evaluates,
        evaluation=None if row.evaluation is None else _evaluation(row.evaluation),
    )


def columns_of(settings: TaskSettings) -> dict[str, Any]:
    """The columns of a task's settings. Defaults are written out, so that those of a later version change no task."""
    whole = msgspec.to_builtins(settings) | {"minimum": settings.policy.minimum}
    return {"population": whole.pop("population"), "settings": whole}


def settings_of(task_id: str, population: str, stored: Mapping[str, Any]) -> TaskSettings:
    """The settings of a task's columns; one that is not stored has its default.

    Raises UnreadableTask, which names the task and what this version does not know.
    """
    try:
        return _settings(population, json.dumps(stored))
    except InvalidTask as error:
        raise UnreadableTask(f"settings of task {task_id}: {error}; {_NEWER}") from error


@lru_cache(maxsize=4096)  # every task that is not over is read several times a second, and its settings stay
def _settings(population: str, stored: str) -> TaskSettings:
    return build(TaskSettings, {**json.loads(stored), "population": population})


def signed_of(value: object) -> Signed | None:
    """The signed statement of a column; None when it is NULL."""
    return None if value is None else _statement(value)


def round_of(row: Row[Any], abort_reasons: dict[str, int]) -> RoundRecord:
    """The round of a row, with how many assignments were aborted for which reason."""
    same = ("id", "number", "attempt", "reason", *COUNTS, "metrics", "opened_at")
    return RoundRecord(
        **{name: getattr(row, name) for name in same},
        staleness=tuple(row.staleness),
        abort_reasons=abort_reasons,
        state=RoundState(row.state),
        seconds=None if row.ended_at is None else row.ended_at - row.opened_at,
        checkpoint_sha256=row.checkpoint_sha256,
    )


def assignment_of(row: Row[Any]) -> AssignmentRecord:
    """The assignment of a row that has its round, task and report too."""
    same = ("id", "round", "task", "number", "slot", "device", "reason", "plan_sha256")
    return AssignmentRecord(
        **{name: getattr(row, name) for name in same},
        state=AssignmentState(row.state),
        report_sha256=row.sha256,
    )
