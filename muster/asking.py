"""A question to devices, from its words to its answer: compiled, run as a task, waited for and read."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coordinator.errors import InvalidTask
from fedcore.errors import QuestionError

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.entities import Task
    from export.questions.asked import Asked
    from fedcore.plan import Field
    from fedcore.questions.answer import Answer
    from muster.creating import Signs
    from simulator.population import Population

MINIMUM_DEVICES, GOAL, ROUNDS, SELECTION_S = 20, 100, 1, 5.0
"""Of a question: the least devices of a group that is shown, the devices that are asked, its rounds, and how long it
waits for all of them before it asks those that are there."""
TIMEOUT_S, LOOK_S = 600.0, 0.2
KINDS = {"float32", "int64", "int32", "uint8"}


class Terms(NamedTuple):
    """How an answer is protected. private: with noise. secure: masked. minimum_devices: of a group that is shown."""

    minimum_devices: int = MINIMUM_DEVICES
    private: bool = False
    secure: bool = False


class Unanswered(QuestionError):
    """No answer came in time, or the task of the question ended without one."""


def compiled(words: Sequence[str], fields: Sequence[Field], terms: Terms) -> Asked:
    """The question of SQL, or one by name with its arguments. Raises QuestionError, with the place in the text."""
    from export.questions.builtin import BUILTIN, builtin

    first, *rest = words
    if first in BUILTIN:
        return builtin(first, rest, fields, **terms._asdict())
    if rest:
        raise QuestionError(f"a question is one text in quotes, or one of {', '.join(BUILTIN)} with its fields")
    from export.questions.sql import compile_sql

    return compile_sql(first, fields, **terms._asdict())


def parse_field(text: str) -> Field:
    """A field in words: name:type, with its shape as 3x2 and the end of its range behind it, such as y:uint8:10."""
    from fedcore.plan import Field

    name, _, rest = text.partition(":")
    kind, *more = rest.split(":")
    try:
        shape = tuple(int(size) for size in more[0].split("x")) if kind == "float32" and more else ()
        high = int(more[-1]) if kind != "float32" and more else None
        shape = tuple(int(size) for size in more[0].split("x")) if len(more) == 2 else shape
        if not name.isidentifier() or kind not in KINDS or len(more) > 2:
            raise ValueError(text)
    except ValueError:
        raise QuestionError(
            f"a field is name:type, as x:float32, v:float32:3x2 or y:uint8:10 with values below 10, not {text!r}"
        ) from None
    return Field(name, kind, shape, high)  # type: ignore[arg-type]


def fields_of(store: TaskStore, population: str, like: str | None = None) -> tuple[Field, ...]:
    """The fields of a population's examples, as its newest task has them, or the task `like`. Raises QuestionError."""
    from fedcore.plan import Plan

    tasks = [task for task in store.tasks() if task.settings.population == population]
    if like is not None:
        tasks = [store.task(like)]
    if not tasks:
        raise QuestionError(
            f"no task of population {population!r} says which fields its examples have: name them with --field, as "
            "--field x:float32 --field y:uint8:10"
        )
    found: dict[str, Field] = {}
    for task in tasks:  # later ones win
        found |= {field.name: field for field in Plan.decode(store.plan_part(task.id)).examples.fields}
    return tuple(found.values())


def fields_in(population: Population) -> tuple[Field, ...]:
    """The fields of a data set's examples, with the range of whole numbers that it has."""
    from fedcore.plan import Field

    found = []
    for name, values in population.fields.items():
        high = int(values.max()) + 1 if values.dtype.kind in "iu" else None
        found.append(Field(name, str(values.dtype), values.shape[1:], high))  # type: ignore[arg-type]
    return tuple(found)


def begin(  # noqa: PLR0913  # what is asked, of whom, and under which signature
    store: TaskStore,
    asked: Asked,
    settings: Mapping[str, Any],
    note: Callable[[str], None],
    *,
    formats: Sequence[str] = ("onnx",),
    sign: Signs | None = None,
    folder: Path | None = None,
) -> Task:
    """Start the task of a question. folder: where its bundle stays; by default nowhere. Raises as `register_task`."""
    from muster.creating import Creation

    with tempfile.TemporaryDirectory(prefix="muster-question-") as temporary:
        place = folder or Path(temporary, "plan")
        bundle = export_question(asked, place, formats, note)
        note("create the task")
        name = f"question: {asked.question.text}"[:60]
        return Creation(bundle, name=name, sign=sign).register(store, settings, text=True)


def export_question(asked: Asked, folder: Path, formats: Sequence[str], note: Callable[[str], None]) -> Any:
    """The bundle of a question, in a folder."""
    from export.build import export_bundle
    from export.model import Model

    return export_bundle(
        Model(asked.spec()),
        asked.algorithm(),
        folder,
        targets=formats,
        progress=lambda form, doing: note(f"{form} {doing}".strip()),
    )


def settings_of_question(asked: Asked, given: Mapping[str, Any], privacy: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of a question's task: those that are given, and defaults that suit questions.

    A round takes whoever waits after a few seconds, with as many reports as a shown group needs at least. A device
    takes part once, as two answers of it would be counted twice.
    """
    rounds = int(given.get("rounds", ROUNDS))
    chosen: dict[str, Any] = {
        "goal": GOAL,
        "rounds": ROUNDS,
        "over_selection": 1.0,
        "selection_timeout_s": SELECTION_S,
        "min_separation_rounds": rounds,
        **given,
    }
    least = min(int(chosen["goal"]), asked.question.minimum_devices)
    return {"minimum": least, **chosen, **({} if privacy is None else {"privacy": dict(privacy)})}


def wait_for(store: TaskStore, task: Task, timeout_s: float, note: Callable[[str], None]) -> None:
    """Wait until a question's task is over. Raises Unanswered when it takes longer, or is paused."""
    until = time.monotonic() + timeout_s
    while True:
        now, progress = store.task(task.id), store.progress_of(task.id)
        note(progress.sentence)
        if now.state.ended:
            return
        if now.state == "paused":
            raise Unanswered(f"task {task.id} is paused: {now.reason or progress.sentence}")
        if time.monotonic() >= until:
            raise Unanswered(
                f"no answer within {timeout_s:g} s: {progress.sentence} The question stays open as task {task.id}: "
                f"read it later with `muster ask --task {task.id}`, or end it with `muster task cancel {task.id}`"
            )
        time.sleep(LOOK_S)


def read_answer(store: TaskStore, task_id: str) -> Answer:
    """The answer so far to the question of a task.

    Raises WrongKind for a task that asks none, and Unanswered before the first round.
    """
    from fedcore.questions.answer import Answer

    found = store.answer(task_id)
    if found.round == 0:
        raise Unanswered(f"task {task_id} has no answer yet: {store.progress_of(task_id).sentence}")
    rows: Any = found.rows
    return Answer(found.columns, rows, found.devices, found.hidden_groups, found.errors)


def promise_of(epsilon: float, delta: float | None, users: int | None) -> dict[str, float | int]:
    """The settings of privacy. Raises InvalidTask where the number of users is missing."""
    if users is None:
        raise InvalidTask("--epsilon needs --users: how many devices the population has, among which one hides")
    return {"epsilon": epsilon, "delta": 1 / (10 * users) if delta is None else delta, "users": users}
