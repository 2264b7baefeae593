"""What pages show, as values: rows in, no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from coordinator.dashboard.curves import Curve, curves
from coordinator.rounds import RoundState
from coordinator.store.overview import LiveRound, Totals
from coordinator.store.records import Records
from coordinator.store.rows import Task, Transition

_RECENT = 20
_NOTHING = Totals(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Live:
    """A round that runs, with the task that it belongs to."""

    round: LiveRound
    task: Task

    @property
    def goal(self) -> int:
        """Reports that end it."""
        return self.task.settings.goal

    @property
    def until(self) -> str:
        """When its state ends at the latest, as a time of day, UTC; empty where nothing says so."""
        policy = self.task.settings.policy
        limits = {
            RoundState.SELECTING: policy.selection_timeout_s,
            RoundState.REPORTING: policy.reporting_deadline_s,
        }
        limit_s = limits.get(self.round.state)
        return "" if limit_s is None else clock(self.round.entered_at + limit_s)


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task on the overview."""

    task: Task
    totals: Totals
    live: tuple[Live, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the funnel, and its share of the assignments in hundredths."""

    name: str
    count: int
    percent: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a round that ended."""

    number: int
    attempt: int
    state: str
    reason: str
    assigned: int
    reported: int
    seconds: float
    ended: str


@dataclass(frozen=True, slots=True)
class TaskPage:
    """All that the page of a task shows."""

    line: TaskLine
    funnel: tuple[Step, ...]
    abort_reasons: dict[str, int]
    curves: tuple[Curve, ...]
    attempts: tuple[Attempt, ...]
    history: tuple[Transition, ...]


def populations(records: Records) -> dict[str, list[TaskLine]]:
    """Every task by its population, both in the order of their names and ages."""
    found: dict[str, list[TaskLine]] = {name: [] for name in sorted(records.populations())}
    live, totals = records.overview.live(), records.overview.totals()
    for task in records.tasks():
        found[task.settings.population].append(_line(task, live, totals))
    return found


def task_page(records: Records, task_id: str) -> TaskPage:
    """What there is to see of a task. Raises UnknownTask."""
    task, overview = records.task(task_id), records.overview
    line = _line(task, overview.live(), overview.totals())
    latest = overview.latest(task_id, _RECENT)
    return TaskPage(
        line=line,
        funnel=_funnel(line.totals),
        abort_reasons=overview.abort_reasons([row.id for row in latest]),
        curves=tuple(curves(overview.curve(task_id))),
        attempts=tuple(
            Attempt(
                row.number,
                row.attempt,
                row.state,
                row.reason,
                row.assigned,
                row.reported,
                row.ended_at - row.opened_at,
                clock(row.ended_at),
            )
            for row in latest
        ),
        history=tuple(records.history(task)),
    )


def clock(at: float) -> str:
    """A time, in seconds since 1970, as one of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def date(at: float) -> str:
    """A time, in seconds since 1970, as a date and a time of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _line(task: Task, live: Sequence[LiveRound], totals: dict[str, Totals]) -> TaskLine:
    mine = tuple(Live(one, task) for one in live if one.task == task.id)
    return TaskLine(task, totals.get(task.id, _NOTHING), mine)


def _funnel(totals: Totals) -> tuple[Step, ...]:
    steps = (
        ("assigned", totals.assigned),
        ("reported", totals.reported),
        ("gave up", totals.aborted),
        ("expired", totals.expired),
    )
    whole = totals.assigned or 1
    return tuple(Step(name, count, 100 * count / whole) for name, count in steps)
