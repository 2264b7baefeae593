"""Values that the pages show: rows in, no HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from coordinator.dashboard.curves import Curve, curves
from coordinator.rules.buffers import mean_staleness
from coordinator.rules.entities import LiveRound, SessionShape, Task, Transition
from coordinator.rules.progress import Progress
from coordinator.rules.states import RoundState
from coordinator.store.overview_records import Totals
from coordinator.store.records import Records

_RECENT = 20
_PASSAGE = ("accepted", "waited", "assigned", "fetched checkpoint", "reported")
"""Steps of a session that reports, in order."""
_NOTHING = Totals(0, 0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Live:
    """A round that runs, with the task that it belongs to."""

    round: LiveRound
    task: Task

    @property
    def goal(self) -> int:
        """Reports that end it."""
        return self.task.settings.in_round(self.round.number).goal

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of its reports so far, in mode buffered."""
        return mean_staleness(self.round.staleness)

    @property
    def until(self) -> str:
        """When its state ends at the latest, as a time of day, UTC; empty where nothing says so."""
        policy = self.task.settings.policy
        limits = {RoundState.SELECTING: policy.selection_timeout_s}
        if not policy.buffered:
            limits[RoundState.REPORTING] = policy.reporting_deadline_s
        limit_s = limits.get(self.round.state)
        return "" if limit_s is None else clock(self.round.entered_at + limit_s)


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task on the overview."""

    task: Task
    progress: Progress
    totals: Totals
    live: tuple[Live, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a funnel, and its share of the whole in hundredths."""

    name: str
    count: int
    percent: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a round that ended. stale: assignments too stale at its end; staleness: the mean of its reports."""

    number: int
    attempt: int
    state: str
    reason: str
    assigned: int
    reported: int
    stale: int
    staleness: float
    seconds: float
    ended: str


@dataclass(frozen=True, slots=True)
class TaskPage:
    """All that the page of a task shows."""

    line: TaskLine
    assignments: tuple[Step, ...]
    abort_reasons: dict[str, int]
    sessions: tuple[Step, ...]
    rejections: dict[str, int]
    curves: tuple[Curve, ...]
    spent: tuple[Curve, ...]
    attempts: tuple[Attempt, ...]
    history: tuple[Transition, ...]


def populations(records: Records) -> dict[str, list[TaskLine]]:
    """Every task by its population, both in the order of their names and ages."""
    found: dict[str, list[TaskLine]] = {name: [] for name in sorted(records.populations())}
    for line in _lines(records, records.tasks()):
        found[line.task.settings.population].append(line)
    return found


def task_page(records: Records, task_id: str) -> TaskPage:
    """What there is to see of a task. Raises UnknownTask."""
    task, overview = records.task(task_id), records.overview
    (line,) = _lines(records, [task])
    latest, sessions = overview.latest(task_id, _RECENT), records.sessions.of(task)
    return TaskPage(
        line=line,
        assignments=_assignments(line.totals),
        abort_reasons=overview.abort_reasons([row.id for row in latest]),
        sessions=_passage(sessions),
        rejections=_rejections(sessions),
        curves=tuple(curves(overview.curve(task_id))),
        spent=tuple(curves([(one.number, {"ε": one.epsilon}) for one in records.ledger.spent(task_id)])),
        attempts=tuple(
            Attempt(
                row.number,
                row.attempt,
                row.state,
                row.reason,
                row.assigned,
                row.reported,
                row.stale,
                mean_staleness(row.staleness),
                row.ended_at - row.opened_at,
                clock(row.ended_at),
            )
            for row in latest
        ),
        history=tuple(records.history(task)),
    )


def kept_models(records: Records, task_id: str) -> dict[str, Any]:
    """A task, and the numbers and metrics of the rounds whose models are kept, newest first. Raises UnknownTask."""
    task = records.task(task_id)
    kept = set(records.garbage.rounds_with_models(task_id))
    rounds = [(number, metrics) for number, metrics in records.overview.curve(task_id) if number in kept]
    return {"task": task, "models": [*reversed(rounds), (0, {})]}


def clock(at: float) -> str:
    """A time, in seconds since 1970, as one of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def date(at: float) -> str:
    """A time, in seconds since 1970, as a date and a time of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _lines(records: Records, tasks: Sequence[Task]) -> list[TaskLine]:
    live, totals = records.overview.live(), records.overview.totals()
    found = []
    for task, progress in zip(tasks, records.progress(tasks), strict=True):
        mine = tuple(Live(one, task) for one in live if one.task == task.id)
        found.append(TaskLine(task, progress, totals.get(task.id, _NOTHING), mine))
    return found


def _assignments(totals: Totals) -> tuple[Step, ...]:
    ended = (
        ("assigned", totals.assigned),
        ("reported", totals.reported),
        ("aborted", totals.aborted),
        ("lost", totals.lost),
        ("not needed", totals.not_needed),
        ("expired", totals.expired),
        ("too stale", totals.stale),
        ("at work", totals.going_on),
    )
    return _shares([one for one in ended if one[1] or one[0] not in ("too stale", "at work")], totals.assigned)


def _passage(sessions: Sequence[SessionShape]) -> tuple[Step, ...]:
    """Sessions by the steps that they reached."""
    everyone = sum(one.count for one in sessions)
    reached = [(step, sum(one.count for one in sessions if step in one.steps)) for step in _PASSAGE]
    return _shares([("checked in", everyone), *reached], everyone)


def _rejections(sessions: Sequence[SessionShape]) -> dict[str, int]:
    """Rejected sessions by reason, most first."""
    found = Counter[str]()
    for one in sessions:
        _, rejected, reason = one.steps[-1].partition("rejected: ")
        if rejected:
            found[reason] += one.count
    return dict(found.most_common())


def _shares(steps: Iterable[tuple[str, int]], whole: int) -> tuple[Step, ...]:
    return tuple(Step(name, count, 100 * count / (whole or 1)) for name, count in steps)
