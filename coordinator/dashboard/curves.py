"""Pictures of the dashboard as the numbers of an inline SVG, and values of a question's page. Rows in, no HTML."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from coordinator.errors import UnknownBlob
from coordinator.rules.entities import Task
from coordinator.rules.kinds import QUESTIONS, TaskAnswer, answers_twice, kind_of, question_in, question_of
from coordinator.store.models import read_answer
from coordinator.store.records.records import Records
from coordinator.store.tasks import CoordinatorStore
from fedcore.errors import FedcoreError
from fedcore.questions.question import Call, Cell, Group, Shown, Value

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 48, WIDTH - 10, 10, HEIGHT - 34
"""The edges of what is drawn in."""
_MOST_POINTS = 160
_TICKS = 4
_UNITS = {"accuracy": "share of examples", "loss": "mean per example"}
Values: TypeAlias = Sequence[tuple[float, float]]
"""Places on the horizontal axis, ascending, each with a value."""


class Point(NamedTuple):
    """A place in the picture, and what it stands for."""

    x: float
    y: float
    at: float
    value: float


class Tick(NamedTuple):
    """A number beside an axis, at a distance from the picture's left or upper edge."""

    place: float
    label: str


class Line(NamedTuple):
    """The points of one series from left to right."""

    name: str
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        """The `points` of a polyline."""
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)

    @property
    def last(self) -> Point:
        """The newest point."""
        return self.points[-1]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the same axes. unit: of the values; horizontal: what the horizontal axis counts."""

    name: str
    unit: str
    horizontal: str
    lines: tuple[Line, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    low: float
    high: float

    left, right, top, bottom = LEFT, RIGHT, TOP, BOTTOM


class Scale(NamedTuple):
    """From numbers to places: `low` is at `start`, `high` at `end`; as logarithms with `log`, in steps of `least`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    least: float = 0.0

    def place(self, value: float) -> float:
        """Where a value is."""
        low, high, at = (math.log10(number) if self.log else number for number in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((at - low) / (high - low) if high > low else 0.5)

    def ticks(self) -> tuple[Tick, ...]:
        """Round numbers, a few."""
        if self.high <= self.low:
            values = [self.low]
        elif self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            stride = max(1, -(-(last - first + 1) // (_TICKS + 1)))
            values = [10.0**power for power in range(first, last + 1, stride)]
            values = values if len(values) > 1 else [self.low, self.high]
        else:
            step = max(self.least, _round_step((self.high - self.low) / _TICKS))
            values = [step * count for count in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return tuple(Tick(self.place(value), f"{value:.4g}") for value in values)


def charts(rounds: Sequence[tuple[int, Mapping[str, float]]], *, log: bool = False) -> tuple[Chart, ...]:
    """A chart for every metric with a finite value, by name, over the numbers of rounds."""
    names = sorted({name for _, metrics in rounds for name in metrics})
    series = ((name, [(number, metrics[name]) for number, metrics in rounds if name in metrics]) for name in names)
    drawn = (chart(name, {name: values}, unit_of(name), log=log) for name, values in series)
    return tuple(picture for picture in drawn if picture is not None)


def chart(
    name: str,
    series: Mapping[str, Values],
    unit: str = "",
    horizontal: str = "round",
    *,
    log: bool = False,
    whole: bool = True,
) -> Chart | None:
    """A chart of finite values by the names of their series; None without one. Long lines are thinned, ends kept.

    log: whether the values have a logarithmic axis, which those of 0 and below have no place on. whole: whether the
    horizontal axis has whole numbers only.
    """
    kept = {label: _thinned([pair for pair in values if _has_place(pair[1], log)]) for label, values in series.items()}
    kept = {label: values for label, values in kept.items() if values}
    if not kept:
        return None
    ats, values = ([pair[part] for pairs in kept.values() for pair in pairs] for part in (0, 1))
    across = Scale(min(ats), max(ats), LEFT, RIGHT, least=1.0 if whole else 0.0)
    up = Scale(min(values), max(values), BOTTOM, TOP, log)
    lines = (
        Line(label, tuple(Point(across.place(at), up.place(value), at, value) for at, value in pairs))
        for label, pairs in kept.items()
    )
    return Chart(name, unit, horizontal, tuple(lines), across.ticks(), up.ticks(), up.low, up.high)


def unit_of(metric: str) -> str:
    """The unit of a metric by the last part of its name; "" where that says nothing."""
    return _UNITS.get(metric.rpartition(".")[2], "")


def _has_place(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _thinned(values: Values) -> Values:
    stride = math.ceil(len(values) / _MOST_POINTS) or 1
    return [*values[:-1:stride], *values[-1:]]


def _round_step(step: float) -> float:
    """The next number of 1, 2 or 5 times a power of ten that is no smaller."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


_MOST_PICTURES = 4
_MOST_BARS = 24
"""More groups of numbers are drawn as a line."""
_MOST_IN_GRID = 40
"""Rows or columns of a grid that can be told apart."""
_LABELS = 8
"""Labels beside an axis that have room."""
_LETTER = 7.0
"""The width of a letter."""
_LETTERS_BESIDE = 6
"""The letters of a name on the left of a picture."""
_LARGEST = 1e100
"""Numbers of which differences are finite."""
_ROOM = 0.8
"""The share of its place that a bar takes."""


class Mark(NamedTuple):
    """A bar or a cell: its place and size, how dark it is from 0 to 1, where its error ends, and what it stands for."""

    x: float
    y: float
    width: float
    height: float
    shade: float
    error: tuple[float, float] | None
    words: str


class Bars(NamedTuple):
    """Bars over the groups of one key, or the cells of a grid over those of two. zero: where bars begin."""

    name: str
    kind: str
    horizontal: str
    vertical: str
    marks: tuple[Mark, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    zero: float
    left: float = LEFT
    right: float = RIGHT
    bottom: float = BOTTOM


class Labels(NamedTuple):
    """The columns that name the groups, by their places: one for each key; and all that only name something."""

    keys: tuple[int, ...]
    names: frozenset[int]


Picture: TypeAlias = Chart | Bars
Column: TypeAlias = Sequence[float | None]


def pictures(answer: TaskAnswer, labels: Labels) -> list[Picture]:
    """Pictures of the first columns with sums that are numbers, over one key or two."""
    keys = labels.keys
    if not answer.rows or not 1 <= len(keys) <= 2:
        return []
    drawn: list[Picture] = []
    for place in (place for place in range(len(answer.columns)) if place not in labels.names):
        values = [_number(row[place]) for row in answer.rows]
        errors = [row[place] for row in answer.errors] if answer.errors else [None] * len(values)
        if any(value is not None for value in values) and len(drawn) < _MOST_PICTURES:
            one = _over_one(answer, keys[0], place, values, errors) if len(keys) == 1 else None
            picture = one or (_grid(answer, keys, place, values) if len(keys) == 2 else None)
            drawn += [] if picture is None else [picture]
    return drawn


def _over_one(answer: TaskAnswer, key: int, place: int, values: Column, errors: Column) -> Picture | None:
    name, horizontal = answer.columns[place], answer.columns[key]
    groups = [row[key] for row in answer.rows]
    numbers = [_number(group) for group in groups]
    if len(groups) > _MOST_BARS:
        pairs = zip(numbers, values, strict=True)
        points = sorted((at, value) for at, value in pairs if at is not None and value is not None)
        whole = all(at == round(at) for at, _ in points)
        return chart(name, {name: points}, horizontal=horizontal, whole=whole) if points else None
    scale = _scale(values, errors)
    step = (RIGHT - LEFT) / len(groups)
    zero, marks = scale.place(0.0), []
    for index, (value, error) in enumerate(zip(values, errors, strict=True)):
        if value is None:
            continue
        at, x = scale.place(value), LEFT + step * (index + (1 - _ROOM) / 2)
        whisker = None
        if error is not None:
            whisker = (scale.place(max(value - error, scale.low)), scale.place(min(value + error, scale.high)))
        words = f"{horizontal} {groups[index]}: {value:.6g}" + ("" if error is None else f" ± {error:.3g}")
        marks.append(Mark(x, min(at, zero), step * _ROOM, abs(at - zero), 1.0, whisker, words))
    across = _labels(groups, LEFT, step, _letters(len(groups)))
    return Bars(name, "bars", horizontal, "", tuple(marks), across, scale.ticks(), zero)


def _scale(values: Column, errors: Column) -> Scale:
    """From numbers to heights, with 0 among them. Of errors that are larger than all values the ends are cut off."""
    known = [(value, error or 0.0) for value, error in zip(values, errors, strict=True) if value is not None]
    low, high = min(0.0, *(value for value, _ in known)), max(0.0, *(value for value, _ in known))
    room = (high - low) / 2 or 1.0
    low = max(min(0.0, *(value - error for value, error in known)), low - room)
    high = min(max(0.0, *(value + error for value, error in known)), high + room)
    return Scale(low, high, BOTTOM, TOP)


def _grid(answer: TaskAnswer, keys: Sequence[int], place: int, values: Column) -> Bars | None:
    down, across = (list(dict.fromkeys(row[key] for row in answer.rows)) for key in keys)
    if max(len(down), len(across)) > _MOST_IN_GRID:
        return None
    known = [value for value in values if value is not None]
    low, high = min(0.0, *known), max(known)
    width, height = (RIGHT - LEFT) / len(across), (BOTTOM - TOP) / len(down)
    marks = []
    for row, value in zip(answer.rows, values, strict=True):
        if value is None:
            continue
        x, y = LEFT + width * across.index(row[keys[1]]), TOP + height * down.index(row[keys[0]])
        shade = 1.0 if high <= low else (value - low) / (high - low)
        words = ", ".join(f"{answer.columns[key]} {row[key]}" for key in keys)
        marks.append(Mark(x, y, width, height, shade, None, f"{words}: {value:.6g}"))
    vertical, horizontal = (answer.columns[key] for key in keys)
    names = _labels(across, LEFT, width, _letters(len(across))), _labels(down, TOP, height, _LETTERS_BESIDE)
    return Bars(answer.columns[place], "grid", horizontal, vertical, tuple(marks), *names, BOTTOM)


def _labels(groups: Sequence[object], start: float, step: float, room: int) -> tuple[Tick, ...]:
    """The names of groups, at the middle of their places; of many, some. room: the letters that a name may have."""
    stride = math.ceil(len(groups) / _LABELS)
    return tuple(
        Tick(start + step * (index + 0.5), _short(group, room))
        for index, group in enumerate(groups)
        if index % stride == 0
    )


def _short(group: object, most: int) -> str:
    text = "NULL" if group is None else f"{group:.4g}" if isinstance(group, float) else str(group)
    return text if len(text) <= most else text[: most - 1] + "…"


def _letters(groups: int) -> int:
    """The letters of names that stand beside each other below a picture."""
    return int((RIGHT - LEFT) / min(groups, _LABELS) / _LETTER)


def _number(value: object) -> float | None:
    """A number of a table that can be drawn; None for NULL, text, several numbers and what is beyond all measure."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


_MOST = 6
"""Tasks in one picture: more colours cannot be told apart."""


def comparison(chosen: Sequence[str], metric: str, scale: str, records: Records) -> dict[str, Any]:
    """The page that compares the tasks with these ids; without a metric, by the first that one of them has.

    Ids of no task are left out, and so are tasks beyond the sixth, and questions, which have no curve.
    """
    tasks = [task for task in records.tasks()[::-1] if kind_of(task.algorithm.name) != "question"]
    shown = [task for task in tasks if task.id in chosen][:_MOST]
    curves = {task.id: records.overview.curve(task.id) for task in shown}
    metrics = sorted({name for rounds in curves.values() for _, values in rounds for name in values})
    metric = metric if metric in metrics else next(iter(metrics), "")
    series = {
        f"{task.name}, {task.id[:4]}": [
            (number, values[metric]) for number, values in curves[task.id] if metric in values
        ]
        for task in shown
    }
    return {
        "tasks": tasks,
        "chosen": {task.id for task in shown},
        "metrics": metrics,
        "metric": metric,
        "scale": scale,
        "chart": chart(metric, series, unit_of(metric), log=scale == "log"),
        "most": _MOST,
    }


# Values that the page of a question shows: its answer, commands, and other questions. Rows in, no HTML.


_MOST_ROWS = 200
_MOST_OTHERS = 20


class OtherQuestion(NamedTuple):
    """Another question of the population. devices: that answered, once for each round."""

    task: Task
    text: str
    devices: int


class AskedPart(NamedTuple):
    """What the page of a question shows. answer: None where it cannot be read, and then `why` in words.

    rows: of the table, each value with its error; `more` are left out. again: the command that asks once more, if it is
    SQL; csv: the one that reads the answer. twice: whether a device may count in several rounds.
    """

    text: str
    answer: TaskAnswer | None
    why: str
    rows: tuple[tuple[tuple[object, float | None], ...], ...]
    more: int
    pictures: list[Picture]
    again: str
    csv: str
    twice: bool
    others: tuple[OtherQuestion, ...]


def asked_part(store: CoordinatorStore, records: Records, task: Task) -> AskedPart:
    """The part of a page that is about the question of a task."""
    answer, why, drawn = None, "", list[Picture]()
    try:
        answer = read_answer(store, records, task)
        drawn = pictures(answer, _labels_of(store, task))
    except UnknownBlob:
        why = "The answer of the last round is not readable yet."
    except FedcoreError as error:
        why = f"The answer cannot be read: {error}"
    rows = [] if answer is None else list(zip(answer.rows, answer.errors or [()] * len(answer.rows), strict=True))
    return AskedPart(
        text=question_of(task.algorithm),
        answer=answer,
        why=why,
        rows=tuple(tuple(zip(row, errors or (None,) * len(row), strict=True)) for row, errors in rows[:_MOST_ROWS]),
        more=max(len(rows) - _MOST_ROWS, 0),
        pictures=drawn,
        again=again(task, answer),
        csv=shlex.join(["muster", "ask", "--task", task.id, "--csv", "-"]),
        twice=answers_twice(task.settings, store.algorithm(task.algorithm)),
        others=tuple(
            OtherQuestion(other, question_of(other.algorithm), devices)
            for other, devices in records.overview.questions(task.settings.population, QUESTIONS, _MOST_OTHERS + 1)
            if other.id != task.id
        )[:_MOST_OTHERS],
    )


def again(task: Task, answer: TaskAnswer | None) -> str:
    """The command that asks the SQL of a task once more; empty for a question by name, whose text is for owners."""
    settings, text = task.settings, question_of(task.algorithm)
    if not text.upper().startswith("SELECT"):
        return ""
    words: list[object] = ["muster", "ask", text, "--population", settings.population, "--goal", settings.goal]
    words += [] if answer is None else ["--minimum-devices", answer.minimum_devices]
    words += ["--rounds", settings.rounds] if settings.rounds > 1 else []
    words += ["--secagg"] if settings.secagg else []
    if settings.privacy is not None:
        budget = settings.privacy
        words += ["--epsilon", f"{budget.epsilon:g}", "--delta", f"{budget.delta:g}", "--users", budget.users]
    return shlex.join(map(str, words))


def _labels_of(store: CoordinatorStore, task: Task) -> Labels:
    """The columns that name groups: the first of each key; and all that have no sum in them."""
    asked = question_in(store.algorithm(task.algorithm))
    if asked is None:
        return Labels((0,), frozenset({0}))
    read = [(place, list(_parts(column.value))) for place, column in enumerate(asked.columns)]
    names = {place: parts for place, parts in read if not any(isinstance(part, Cell | Shown) for part in parts)}
    keys = [
        [place for place, parts in names.items() if [part.key for part in parts if isinstance(part, Group)] == [key]]
        for key in range(len(asked.keys))
    ]
    return (
        Labels(tuple(places[0] for places in keys if places), frozenset(names))
        if all(keys)
        else Labels((), frozenset())
    )


def _parts(value: Value) -> Iterator[Value]:
    yield value
    for argument in value.arguments if isinstance(value, Call) else ():
        yield from _parts(argument)
