"""Values that the page of a question shows: its answer, commands, and other questions. Rows in, no HTML."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from coordinator.dashboard.curves import Labels, Picture, pictures
from coordinator.errors import UnknownBlob
from coordinator.rules.entities import Task
from coordinator.rules.kinds import QUESTIONS, TaskAnswer, answers_twice, question_in, question_of
from coordinator.store.questions import read_answer
from coordinator.store.records.records import Records
from coordinator.store.tasks import CoordinatorStore
from fedcore.errors import FedcoreError
from fedcore.questions.question import Call, Cell, Group, Shown, Value

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
        drawn = pictures(answer, _labels(store, task))
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


def _labels(store: CoordinatorStore, task: Task) -> Labels:
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
