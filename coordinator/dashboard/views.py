"""Values that the pages of tasks, rounds and populations show: rows in, no HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias
from urllib.parse import urlencode

import numpy as np
from fastapi import Depends
from pydantic import Field

from coordinator.api.service import PopulationCounts
from coordinator.dashboard.curves import Chart, chart, charts
from coordinator.dashboard.rendering import age, clock
from coordinator.errors import UnknownBlob, UnknownPopulation, UnknownRound
from coordinator.rules.alerts import Alert
from coordinator.rules.entities import LiveRound, Measured, RoundRecord, SessionShape, Task, Transition
from coordinator.rules.kinds import Figures, Kind, figures_of, kind_of, means_of
from coordinator.rules.progress import Progress
from coordinator.rules.states import RoundState, TaskState
from coordinator.store.records.overview import PAGE, SORTED_BY, TaskQuery, Totals
from coordinator.store.records.records import Records
from fedcore.params import FLOAT_BYTES
from fedcore.plan import Plan


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a funnel, and its share of the whole in hundredths."""

    name: str
    count: int
    percent: float


class Funnel(NamedTuple):
    """Steps in order, and how many devices left, by reason."""

    steps: tuple[Step, ...]
    left: tuple[tuple[str, int], ...]


def of_task(totals: Totals, sessions: Sequence[SessionShape], aborts: Mapping[str, int]) -> Funnel:
    """The funnel of the rounds of a task that ended; it grows with its rounds, and stays as it is once it is over.

    sessions: the task's own. aborts: why devices aborted in its rounds, as far as it is still known.
    """
    fetched = sum(shape.count for shape in sessions if "fetched checkpoint" in shape.steps)
    reached = (
        ("assigned", totals.assigned),
        # Sessions are counted when they end, and a crash loses those of a moment.
        ("fetched the model", min(max(fetched, totals.reported), totals.assigned)),
        ("reported", totals.reported),
    )
    unknown = totals.aborted - sum(aborts.values())
    left = (
        *((f"aborted: {reason}", count) for reason, count in aborts.items()),
        ("aborted", unknown),
        ("lost", totals.lost),
        ("expired", totals.expired),
        ("too stale", totals.stale),
        ("not needed", totals.not_needed),
        ("still at work", totals.going_on),
    )
    return Funnel(shares(reached, totals.assigned), tuple((why, count) for why, count in left if count > 0))


def of_population(sessions: Sequence[SessionShape]) -> Funnel:
    """The funnel of the sessions of a population, of all its tasks and without any, and why devices were sent away."""
    everyone = sum(shape.count for shape in sessions)
    passage = ("accepted", "waited", "assigned", "fetched checkpoint", "reported")
    reached = [(step, sum(shape.count for shape in sessions if step in shape.steps)) for step in passage]
    left: dict[str, int] = {}
    for shape in sessions:
        last = shape.steps[-1]
        if last != "reported":
            left[last] = left.get(last, 0) + shape.count
    ordered = sorted(left.items(), key=lambda pair: (-pair[1], pair[0]))
    return Funnel(shares([("checked in", everyone), *reached], everyone), tuple(ordered))


def shares(steps: Iterable[tuple[str, int]], whole: int) -> tuple[Step, ...]:
    """Counts as steps, with their shares of a whole."""
    return tuple(Step(name, count, 100 * count / (whole or 1)) for name, count in steps)


ROUNDS_ON_A_PAGE = 25
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


def rounds_page(records: Records, task_id: str, before: int | None) -> dict[str, Any]:
    """A page of all attempts of a task; `older` is where the next one begins. Raises UnknownTask."""
    task, newest = records.task(task_id), records.overview.latest(task_id, ROUNDS_ON_A_PAGE + 1, before)
    shown = newest[:ROUNDS_ON_A_PAGE]
    metrics = sorted({name for attempt in shown for name in means_of(task.algorithm.name, attempt.metrics)})
    older = shown[-1].id if len(newest) > ROUNDS_ON_A_PAGE else None
    return {"task": task, "attempts": shown, "metrics": metrics, "older": older, "before": before}


def round_page(records: Records, plan: Plan, task_id: str, number: int, attempt: int) -> RoundPage:
    """The page of an attempt at a round of a task with this plan. Raises UnknownTask or UnknownRound."""
    task, found = records.task(task_id), records.overview.attempt(task_id, number, attempt)
    times = records.overview.report_times(found.id)
    report = plan.of_round(number).report
    up = None if task.settings.secagg is not None else report.size * FLOAT_BYTES
    return RoundPage(
        task=task,
        attempt=found,
        phases=_phases(records, found),
        outcomes=tuple(
            (f"{state}: {reason}" if reason else state, count)
            for state, reason, count in records.overview.outcomes(found.id)
        ),
        percentiles=tuple((share, float(np.percentile(times, share))) for share in _PERCENTILES if times),
        up=up,
        down=_checkpoint_bytes(records, task, number),
    )


def _checkpoint_bytes(records: Records, task: Task, number: int) -> int | None:
    """The size of what devices fetch at the start of a round; None once that model is no longer kept."""
    try:
        return records.blob(records.snapshot(task, number - 1).checkpoint_sha256, public=True).size
    except (UnknownRound, UnknownBlob):
        return None


def _phases(records: Records, attempt: RoundRecord) -> tuple[Phase, ...]:
    entered = records.overview.phases(attempt.id)
    ends = [*(at for _, at in entered[1:]), None]
    over = records.at if attempt.seconds is None else attempt.opened_at + attempt.seconds
    whole = max(over - entered[0][1], 1e-9) if entered else 1.0
    phases = []
    for (name, at), until in zip(entered, ends, strict=True):
        if RoundState(name).ended:
            continue
        seconds = max(0.0, (over if until is None else until) - at)
        phases.append(Phase(name, clock(at), seconds, 100 * (at - entered[0][1]) / whole, 100 * seconds / whole))
    return tuple(phases)


_MOST_NAMES = 100
"""Populations that the form offers; others can be typed."""
MOST_ALIKE = 20
"""Alerts of a line that are listed; the others are counted."""


def _asked(
    search: str = "",
    state: str = "",
    population: str = "",
    by: str = SORTED_BY[0],
    page: Annotated[int, Field(ge=1, le=2**31)] = 1,
) -> TaskQuery:
    return TaskQuery(search, state, population, by, page)


Asked: TypeAlias = Annotated[TaskQuery, Depends(_asked)]
"""The tasks that an address asks for."""


class TaskLine(NamedTuple):
    """A task in a list. left: the time that its last rounds would take, empty where nobody knows.

    metric: the first of its newest metrics by name, with its value; None without any, and of a question.
    """

    task: Task
    progress: Progress
    committed: int
    left: str
    age: str
    metric: tuple[str, float] | None

    @property
    def kind(self) -> Kind:
        """Whether it trains, evaluates or asks."""
        return kind_of(self.task.algorithm.name)

    @property
    def why(self) -> str:
        """The reason of its progress in a few words; empty where the state says it."""
        reason = self.progress.reason.value
        return "" if reason == self.task.state else reason.removeprefix("paused-").replace("-", " ")


class AlertLine(NamedTuple):
    """Alerts that are alike: of one kind, and with the same to do."""

    kind: str
    remedy: str
    alerts: tuple[Alert, ...]


def task_table(records: Records, which: TaskQuery) -> dict[str, Any]:
    """A page of tasks as lines, the numbers of its first and last of all that match, and the pages beside it."""
    tasks, matching = records.overview.page(which)
    first = PAGE * (which.page - 1) + 1
    return {
        "lines": task_lines(records, tasks),
        "first": first,
        "last": first + len(tasks) - 1,
        "matching": matching,
        "earlier": address(which._replace(page=which.page - 1)) if which.page > 1 else None,
        "later": address(which._replace(page=which.page + 1)) if PAGE * which.page < matching else None,
    }


def overview_page(records: Records, which: TaskQuery) -> dict[str, Any]:
    """The tasks of the overview, and what its form offers."""
    return task_table(records, which) | {
        "which": which,
        "query": address(which),
        "narrowed": which[:3] != TaskQuery()[:3],
        "states": tuple(TaskState),
        "populations": records.overview.population_names(_MOST_NAMES),
        "sorted_by": SORTED_BY,
    }


def address(which: TaskQuery) -> str:
    """The query of an address that asks for these tasks."""
    usual = TaskQuery()._asdict()
    return urlencode({name: value for name, value in which._asdict().items() if value != usual[name]})


def task_lines(records: Records, tasks: Sequence[Task]) -> list[TaskLine]:
    """A line for each task."""
    these = [task.id for task in tasks]
    paces, newest = records.overview.paces(these), records.overview.newest_metrics(these)
    lines = []
    for task, progress in zip(tasks, records.progress(tasks), strict=True):
        pace = paces.get(task.id)
        committed = 0 if pace is None else pace.committed
        moves = task.state is TaskState.ACTIVE and not progress.stalled
        left = f"{age((task.settings.rounds - committed) * pace.round_s)}" if pace is not None and moves else ""
        shown = {} if kind_of(task.algorithm.name) == "question" else newest.get(task.id, {})
        metric = next(iter(sorted(shown.items())), None)
        lines.append(TaskLine(task, progress, committed, left, age(records.at - task.created_at), metric))
    return lines


def folded(alerts: Iterable[Alert]) -> list[AlertLine]:
    """Alerts as lines, in their order; those with one thing to do are one line. What to do may stand in the text."""
    alike: dict[tuple[str, str], list[Alert]] = {}
    for one in alerts:
        alike.setdefault((one.kind, one.remedy or one.text), []).append(one)
    return [AlertLine(kind, remedy, tuple(some)) for (kind, remedy), some in alike.items()]


_RECENT = 10


class Live(NamedTuple):
    """A round that runs, with the task that it belongs to."""

    round: LiveRound
    task: Task

    @property
    def goal(self) -> int:
        """Reports that end it."""
        return self.task.settings.in_round(self.round.number).goal

    @property
    def until(self) -> str:
        """When its state ends at the latest, as a time of day, UTC; empty where nothing says so."""
        policy = self.task.settings.policy
        limits = {RoundState.SELECTING: policy.selection_timeout_s}
        if not policy.buffered:
            limits[RoundState.REPORTING] = policy.reporting_deadline_s
        limit_s = limits.get(self.round.state)
        return "" if limit_s is None else clock(self.round.entered_at + limit_s)


class TaskPage(NamedTuple):
    """All that the page of a task shows. figures: of the newest round of a task that evaluates."""

    line: TaskLine
    totals: Totals
    live: tuple[Live, ...]
    funnel: Funnel
    figures: Figures | None
    charts: tuple[Chart, ...]
    spent: Chart | None
    epsilon: float
    attempts: tuple[RoundRecord, ...]
    history: tuple[Transition, ...]
    log: bool


def task_page(records: Records, task_id: str, *, log: bool = False) -> TaskPage:
    """The page of a task. log: with logarithmic values in its curves. Raises UnknownTask."""
    task, overview = records.task(task_id), records.overview
    (line,), totals = task_lines(records, [task]), overview.totals(task_id)
    sessions = [shape for shape in records.sessions.of(task) if shape.task]
    spent, kind, curve = records.ledger.spent(task_id), task.algorithm.name, overview.curve(task_id)
    figures = figures_of(kind, curve[-1][1]) if curve else None
    # Of a task that evaluates once the figures say it all, and of a question its answer does.
    said = (figures and len(curve) == 1) or line.kind == "question"
    shown = [] if said else [(number, means_of(kind, metrics)) for number, metrics in curve]
    return TaskPage(
        line=line,
        totals=totals,
        live=tuple(Live(round_, task) for round_ in overview.live([task_id])),
        funnel=of_task(totals, sessions, overview.abort_reasons(task_id)),
        figures=figures,
        charts=charts([*shown, *evaluated(overview.evaluations(task_id))], log=log),
        spent=chart("ε", {"ε": [(row.number, row.epsilon) for row in spent]}, "spent"),
        epsilon=spent[-1].epsilon if spent else 0.0,
        attempts=tuple(overview.latest(task_id, _RECENT)),
        history=tuple(records.history(task)),
        log=log,
    )


def evaluated(evaluations: Sequence[Measured]) -> list[tuple[int, dict[str, float]]]:
    """The means of evaluations over the rounds whose models they measured: of several of a round, the last one's."""
    return list({one.round: (one.round, one.means) for one in evaluations if one.metrics}.values())


def population_page(records: Records, name: str, counts: PopulationCounts) -> dict[str, Any]:
    """The page of a population, whose check-ins at this process are `counts`. Raises UnknownPopulation."""
    if name not in records.populations():
        raise UnknownPopulation(f"there is no population {name!r}")
    over_time = [(round((at - records.at) / 3600, 1) or 0.0, float(count)) for at, count in counts.over_time]
    return task_table(records, TaskQuery(population=name)) | {
        "name": name,
        "counts": counts,
        "over_time": chart("check-ins", {"check-ins": over_time}, "in ten minutes", "hours from now"),
        "sessions": of_population(records.sessions.of_population(name)),
    }


def kept_models(records: Records, task_id: str) -> dict[str, Any]:
    """A task, and the numbers and metrics of the rounds whose models are kept, newest first. Raises UnknownTask."""
    task = records.task(task_id)
    kept = set(records.garbage.rounds_with_models(task_id))
    rounds = [(number, metrics) for number, metrics in records.overview.curve(task_id) if number in kept]
    return {"task": task, "models": [*reversed(rounds), (0, {})]}
