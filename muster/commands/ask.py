"""`muster ask`: a question to devices, in SQL or by name, and its answer as a table, CSV, JSON and a picture."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
import typer

from coordinator.rules.task_settings import TaskSettings
from fedcore.errors import NotWritten
from fedcore.validation import build
from muster import asking
from muster.commands.stores import Blobs, Database, Remote, given_again, open_store
from muster.commands.task import signer
from muster.creating import matching
from muster.options import (
    Data,
    DropMissing,
    InputColumns,
    ReleaseKey,
    TargetColumn,
    UserColumn,
    columns_of,
    option_of,
    with_settings,
)
from muster.output import Json, doing, emit, loading, remark, say, say_next, show_fields, show_table

if TYPE_CHECKING:
    from export.questions.heavy_hitters import AnyQuestion
    from fedcore.questions.answer import Answer
    from simulator.configuration import Columns


STANDARD_OUTPUT = Path("-")


class Outlet(NamedTuple):
    """Where an answer goes. began: when the command did, on the monotonic clock."""

    table: Path | None
    plot: Path | None
    json: bool
    began: float

    def check(self) -> None:
        """Raise NotWritten for a picture in no format, and a file in no folder: an answer may take an hour."""
        from muster.pictures import FORMATS

        if self.plot is not None and self.plot.suffix not in FORMATS:
            raise NotWritten(errno.EINVAL, f"a picture ends in {' or '.join(FORMATS)}", str(self.plot))
        for file in (self.plot, self.table):
            if file is not None and not file.absolute().parent.is_dir():
                raise NotWritten(errno.ENOENT, "there is no such folder", str(file))

    def show(self, answer: Answer, task: str | None = None, so_far: str = "") -> None:
        """Show an answer. task: whose answer it is. so_far: a sentence where more is to come."""
        seconds = time.monotonic() - self.began
        if self.plot is not None:
            from muster.pictures import draw_answer

            draw_answer(answer).save(self.plot)
        if self.table is not None:
            from fedcore.questions.answer import as_csv

            text = as_csv(answer.columns, answer.rows, answer.errors)
            if self.table == STANDARD_OUTPUT:
                for line in text.splitlines():
                    say(line)
            else:
                self.table.write_text(text, "utf-8")
        if self.json:
            facts = {
                "columns": answer.columns,
                "rows": answer.rows,
                "errors": answer.errors,
                "devices": answer.devices,
                "hidden_groups": answer.hidden,
                "seconds": round(seconds, 3),
                "task": task,
            }
            emit(msgspec.to_builtins(facts))
        elif self.table != STANDARD_OUTPUT:
            show_table(answer.columns, answer.shown())
        remark(f"{_counted(answer.devices, 'device')} answered{_hidden(answer)}{so_far}")


def _hidden(answer: Answer) -> str:
    if not answer.hidden:
        return "" if answer.rows else "; no value or group has enough of them to be shown (--minimum-devices)"
    verb = "is" if answer.hidden == 1 else "are"
    return f"; {_counted(answer.hidden, 'group')} of too few devices {verb} not shown"


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"


Where: TypeAlias = dict[str, str | None]
"""The options of the store: its database and blobs, or the coordinator's address."""
OF_TASKS = (
    *("population", "goal", "rounds", "purpose", "where", "starts_at"),
    *("selection_timeout_s", "reporting_deadline_s", "secagg"),
)
"""The settings of a task that the command takes."""
SPREAD = ("secagg", "clear")
"""The parts of which `muster task create` has an option for each setting."""
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="QUESTION", help="SQL in quotes, or a question by name with its fields."),
]
Epsilon = Annotated[float | None, typer.Option(help="Answer with noise: what it may say of a device.")]
Delta = Annotated[float | None, typer.Option(help="The chance that ε does not hold.  [default: 1 / (10 users)]")]
Users = Annotated[int | None, typer.Option(min=1, help="With --epsilon: the devices of the population.")]
Minimum = Annotated[int, typer.Option(min=1, help="Show no group of fewer devices.")]
FieldNames = Annotated[
    list[str] | None,
    typer.Option(
        "--field", metavar="NAME:TYPE[:SHAPE][:HIGH]", help="A field of the examples; else as the last task has them."
    ),
]
Like = Annotated[str | None, typer.Option(metavar="TASK", help="Take the fields of this task's examples.")]
Dataset = Annotated[
    str | None, typer.Option(metavar="NAME", help="Ask the clients of a data set, with no coordinator.")
]
OfTask = Annotated[str | None, typer.Option("--task", metavar="TASK", help="Read the answer of a question's task.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Wait for the answer so long.")]
Csv = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Write the table as CSV; - is standard output.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .svg or .png.")]
Explain = Annotated[bool, typer.Option("--explain", help="Ask nothing: say costs, bounds and what owners read.")]
Formats = Annotated[list[str] | None, typer.Option("--format", help="onnx or executorch; may be repeated.")]
Bundle = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Ask nothing: write the plan, for the release key's holder.")
]


@with_settings(
    TaskSettings,
    spread=("secagg",),
    only=OF_TASKS,
    defaults={"population": None, "goal": None, "rounds": None},
)
def ask(  # one option for each choice
    question: Words = None,
    *,
    settings: dict[str, Any],
    minimum_devices: Minimum = asking.MINIMUM_DEVICES,
    epsilon: Epsilon = None,
    delta: Delta = None,
    users: Users = None,
    release_key: ReleaseKey = None,
    write: Bundle = None,
    field: FieldNames = None,
    like: Like = None,
    formats: Formats = None,
    dataset: Dataset = None,
    data: Data = None,
    user: UserColumn = "",
    inputs: InputColumns = "",
    target: TargetColumn = "",
    drop_missing: DropMissing = False,
    task: OfTask = None,
    timeout: Timeout = asking.TIMEOUT_S,
    explain: Explain = False,
    table: Csv = None,
    plot: Plot = None,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """Ask devices what they hold, and print the answer as a table.

    The question becomes a plan, and its task sums what devices count. Groups of few devices are not shown. Examples:

    muster ask "SELECT y, COUNT(*) FROM examples GROUP BY y" --population phones

    muster ask labels y --population phones --secagg --release-key release.pem

    muster ask "SELECT AVG(CLIP(x, 0, 600)) FROM examples MAX 20 ROWS PER DEVICE" --population phones --epsilon 1
    --users 5000

    muster ask sizes --dataset digits --json
    """
    outlet = Outlet(table, plot, json, time.monotonic())
    outlet.check()
    if json and table == STANDARD_OUTPUT:
        raise typer.BadParameter("standard output takes one of --json and --csv -", param_hint="--csv")
    where: Where = {"db": db, "blobs": blobs, "coordinator": coordinator}
    if task is not None:
        return _read(where, task, outlet, given=bool(question))
    if not question:
        raise typer.BadParameter("ask something, or read an answer with --task", param_hint="QUESTION")
    terms = asking.Terms(minimum_devices, epsilon is not None, "secagg" in settings)
    if dataset is not None:
        source = Source(dataset, data, columns_of(user, inputs, target, drop_missing=drop_missing))
        return _of_dataset(question, terms, source, settings, (epsilon, delta), outlet, explain=explain)
    if user or inputs or target or drop_missing:
        raise typer.BadParameter("columns are of a table, which --dataset names", param_hint="--user/--inputs/--target")
    if "population" not in settings:
        raise typer.BadParameter("name the population, or a data set with --dataset", param_hint="--population")
    privacy = None if epsilon is None else asking.promise_of(epsilon, delta, users)
    fields = _fields(where, field, settings["population"], like)
    with loading():
        import export.build  # noqa: F401  # which the plan will need

        asked = asking.compiled(question, fields, terms)
    order = Order(asked, asking.settings_of_question(asked, settings, privacy), formats or ["onnx"], release_key)
    build(TaskSettings, order.settings, text=True)  # what is wrong with a setting is said before the export
    if explain:
        return _explain(order, fields.source, json)
    if write is not None:
        return _write(order, write, where)
    if terms.secure and release_key is None:
        words = "a secure question is released by a signature: name the key, or write the plan with --write FOLDER"
        raise typer.BadParameter(words, param_hint="--release-key")
    return _asked(where, order, timeout, outlet)


class Source(NamedTuple):
    """A data set, the folder that holds it, and what its columns mean."""

    name: str
    data: Path | None
    columns: Columns


class Order(NamedTuple):
    """A question with the settings of its task, the formats of its graphs, and the key that releases it."""

    asked: AnyQuestion
    settings: dict[str, Any]
    formats: Sequence[str]
    key: Path | None = None


def _read(where: Where, task: str, outlet: Outlet, *, given: bool) -> None:
    """Show the answer of a task, as far as there is one."""
    if given:
        raise typer.BadParameter("the task has its question; leave this one out", param_hint="QUESTION")
    with open_store(**where) as store:
        found = asking.read_answer(store, task)
        rounds = store.task(task).settings.rounds
    so_far = "" if found.over else f", in {found.round} of {rounds} rounds so far"
    return outlet.show(asking.as_answer(found), task, so_far)


def _fields(where: Where, named: list[str] | None, population: str, like: str | None) -> asking.Fields:
    """The fields of examples: those that are named, else as the population's tasks have them."""
    if named:
        return asking.fields_named(named)
    with open_store(**where) as store:
        return asking.fields_of(store, population, like)


def _asked(where: Where, order: Order, timeout: float, outlet: Outlet) -> None:
    """Start the task of a question, wait for it, and show the answer."""
    again = given_again(**where)
    with open_store(**where) as store, doing("ask") as note:
        sign = signer(store, where["db"], order.key)
        begun = asking.begin(store, order.asked, order.settings, note, formats=order.formats, sign=sign)
        task = begun.id
        for sentence in matching(store, begun.settings):
            remark(sentence)
        try:
            asking.wait_for(store, task, timeout, note)
            found = asking.read_answer(store, task)
        except (KeyboardInterrupt, asking.Unanswered) as error:
            if isinstance(error, KeyboardInterrupt):
                remark(f"the question stays open as task {task}")
            say_next("read its answer", ["muster", "ask", "--task", task, *again])
            say_next("or end it", ["muster", "task", "cancel", task, *again])
            raise
    return outlet.show(asking.as_answer(found), task)


def _write(order: Order, folder: Path, where: Where) -> None:
    """Write the plan of a question, and say how it is signed, asked and answered."""
    with doing("write"):
        asking.export_question(order.asked, folder, order.formats)
    again, settings = given_again(**where), typed(order.settings)
    plan = ["--plan", folder, *settings]
    create = ["muster", "task", "create", *plan, "--name", asking.name_of_task(order.asked)]
    if "secagg" in order.settings:
        key = ["--release-key", order.key or "release.pem", "--out", "release.json"]
        say_next("sign it where the key is", ["muster", "task", "release", *plan, *key, *again])
        create += ["--release", "release.json"]
    say_next("ask", [*create, *again])
    say_next("read the answer of the task that this makes", ["muster", "ask", "--task", "TASK", *again])


def typed(settings: Mapping[str, Any]) -> list[str]:
    """Settings of a task as options of `muster task create`."""
    words = list[str]()
    for name, value in settings.items():
        if name in SPREAD:
            words += [*(["--secagg"] if name == "secagg" else []), *typed(value)]
        elif isinstance(value, Mapping):
            words += [word for key, one in value.items() for word in (option_of(name), f"{key}={one}")]
        else:
            words += [option_of(name), str(value)]
    return words


def _of_dataset(
    question: Sequence[str],
    terms: asking.Terms,
    source: Source,
    settings: Mapping[str, Any],
    promise: tuple[float | None, float | None],
    outlet: Outlet,
    *,
    explain: bool,
) -> None:
    """Ask the clients of a data set, in the engine."""
    asking.check_at_once(settings)
    with loading():
        from simulator import datasets
        from simulator.planned import ask_population
    with doing("ask") as note:
        note("load the data")
        population = datasets.load(source.name, source.data, columns=source.columns)
        fields = asking.fields_in(population, f"data set {source.name}")
        asked = asking.compiled(question, fields, terms)
        if explain:
            given = {"population": source.name, "goal": len(population)}
            privacy = None if promise[0] is None else asking.promise_of(promise[0], promise[1], len(population))
            order = Order(asked, asking.settings_of_question(asked, given, privacy), ["onnx"])
            return _explain(order, fields.source, outlet.json)
        note("ask its clients")
        found = ask_population(asked, population, epsilon=promise[0], delta=promise[1])
    return outlet.show(found)


def _explain(order: Order, source: str, json: bool) -> None:
    """Print what a question costs a device and may say of it."""
    from muster.asking import explained

    facts, blocks = explained(order.asked, order.settings, order.formats, source)
    if json:
        return emit(facts | {"blocks": blocks})
    show_fields({name: value for name, value in facts.items() if value not in (None, {})})
    say()
    return show_table(tuple(blocks[0]), [tuple(block.values()) for block in blocks])
