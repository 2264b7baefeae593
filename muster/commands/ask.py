"""`muster ask`: a question to devices, in SQL or by name, and its answer as a table."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import typer

from coordinator.rules.task_settings import TaskSettings
from muster.asking import MINIMUM_DEVICES, ROUNDS, TIMEOUT_S, Terms, promise_of
from muster.commands.stores import Blobs, Database, Remote, given_again, open_store
from muster.options.settings import with_settings
from muster.options.simulate import Data
from muster.options.task import ReleaseKey
from muster.output import Json, doing, emit, remark, say, say_next, show_fields, show_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from export.questions.asked import Asked
    from fedcore.plan import Field
    from fedcore.questions.answer import Answer

Where: TypeAlias = dict[str, str | None]
"""The options of the store: its database and blobs, or the coordinator's address."""
QUESTION_SETTINGS = (
    *("population", "goal", "rounds", "minimum", "over_selection", "selection_timeout_s", "min_separation_rounds"),
)
"""The settings of a question's task that have values of their own."""
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
        "--field", metavar="NAME:TYPE[:HIGH]", help="A field of the examples; else as the last task has them."
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
    only=("population", "goal", "rounds", "secagg", "reporting_deadline_s", "selection_timeout_s", "starts_at"),
    defaults={"population": None, "goal": None, "rounds": None},
)
def ask(  # one option for each choice
    question: Words = None,
    *,
    settings: dict[str, Any],
    minimum_devices: Minimum = MINIMUM_DEVICES,
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
    task: OfTask = None,
    timeout: Timeout = TIMEOUT_S,
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
    began = time.monotonic()
    where = {"db": db, "blobs": blobs, "coordinator": coordinator}
    shown = _Shown(table, plot, json, began)
    if task is not None:
        return shown(_read(where, task), task)
    if not question:
        raise typer.BadParameter("ask something, or read an answer with --task", param_hint="QUESTION")
    terms = Terms(minimum_devices, epsilon is not None, "secagg" in settings)
    if dataset is not None:
        rounds = int(settings.get("rounds", ROUNDS))
        return _of_dataset(question, terms, (dataset, data), (epsilon, delta, rounds), shown, explain=explain)
    if "population" not in settings:
        raise typer.BadParameter("name the population, or a data set with --dataset", param_hint="--population")
    privacy = None if epsilon is None else promise_of(epsilon, delta, users)
    from muster.asking import compiled, settings_of_question

    asked = compiled(question, _fields(where, field, settings["population"], like), terms)
    chosen, targets = settings_of_question(asked, settings, privacy), formats or ["onnx"]
    if explain:
        return _explain(asked, targets, json)
    if write is not None:
        return _write(asked, targets, write, chosen)
    if terms.secure and release_key is None:
        words = "a secure question is released by a signature: name the key, or write the plan with --write FOLDER"
        raise typer.BadParameter(words, param_hint="--release-key")
    return _asked(where, (asked, chosen, targets, release_key), timeout, shown)


def _read(where: Where, task: str) -> Answer:
    from muster.asking import read_answer

    with open_store(**where) as store:
        return read_answer(store, task)


def _fields(where: Where, named: list[str] | None, population: str, like: str | None) -> tuple[Field, ...]:
    """The fields of examples: those that are named, else as the population's tasks have them."""
    from muster.asking import fields_of, parse_field

    if named:
        return tuple(map(parse_field, named))
    with open_store(**where) as store:
        return fields_of(store, population, like)


def _asked(
    where: Where, order: tuple[Asked, dict[str, Any], Sequence[str], Path | None], timeout: float, shown: _Shown
) -> None:
    """Start the task of a question, wait for it, and show the answer."""
    from muster.asking import begin, read_answer, wait_for
    from muster.commands.task import signer

    asked, chosen, formats, key = order
    with open_store(**where) as store, doing("ask") as note:
        begun = begin(store, asked, chosen, note, formats=formats, sign=signer(store, where["db"], key))
        try:
            wait_for(store, begun, timeout, note)
        except KeyboardInterrupt:
            remark(f"the question stays open as task {begun.id}")
            say_next("read its answer", ["muster", "ask", "--task", begun.id, *given_again(**where)])
            raise
        answer = read_answer(store, begun.id)
    return shown(answer, begun.id)


def _write(asked: Asked, formats: Sequence[str], folder: Path, settings: dict[str, Any]) -> None:
    """Write the plan of a question, and say how it is signed and asked."""
    from muster.asking import export_question

    with doing("write") as note:
        export_question(asked, folder, formats, note)
    again = [word for name in QUESTION_SETTINGS for word in _option(name, settings)]
    release = ["muster", "task", "release", "--plan", folder, "--secagg", *again, "--release-key", "release.pem"]
    say_next("sign it where the key is", release)
    say_next("ask", ["muster", "task", "create", "--plan", folder, "--secagg", *again, "--release", "release.json"])


def _option(name: str, settings: dict[str, Any]) -> list[str]:
    """A setting as it is typed."""
    return [f"--{name.replace('_', '-')}", str(settings[name])]


def _of_dataset(
    question: Sequence[str],
    terms: Terms,
    source: tuple[str, Path | None],
    promise: tuple[float | None, float | None, int],
    shown: _Shown,
    *,
    explain: bool,
) -> None:
    """Ask the clients of a data set, in the engine."""
    from muster.asking import compiled, fields_in
    from simulator import datasets
    from simulator.questions import ask_population

    epsilon, delta, rounds = promise
    with doing("ask") as note:
        note("load the data")
        population = datasets.load(*source, None, None)
        asked = compiled(question, fields_in(population), terms)
        if explain:
            return _explain(asked, ["onnx"], shown.json)
        note("ask")
        answer = ask_population(asked, population, rounds=rounds, epsilon=epsilon, delta=delta)
    return shown(answer, None)


def _explain(asked: Asked, formats: Sequence[str], json: bool) -> None:
    """What a question costs a device and may say of it."""
    import tempfile

    from muster.asking import export_question

    question = asked.question
    with tempfile.TemporaryDirectory(prefix="muster-question-") as folder, doing("explain") as note:
        bundle = export_question(asked, Path(folder, "plan"), formats, note)
        evidence = bundle.certificate.formats
        facts = {
            "owners_read": question.text,
            "fields": ", ".join(f"{item.name} {item.dtype}{list(item.shape) or ''}" for item in asked.fields),
            "rows_of_a_device": question.most_rows or "all",
            "groups": question.groups,
            "least_devices_of_a_group": question.minimum_devices,
            "sends": f"{sum(question.block_sizes.values()):,} numbers",
            "sensitivity": f"{question.clip:.4g} (L2, blocks over their norms)" if question.private else "not bounded",
            "graph_bytes": {name: one.footprint.graph_bytes for name, one in evidence.items()},
            "step_cpu_ms": {name: round(one.footprint.step_cpu_ms, 3) for name, one in evidence.items()},
        }
    blocks = [
        {
            "block": block.name,
            "kind": block.kind,
            "numbers": question.block_sizes[question.vectors(block)[0]],
            "low": block.low,
            "high": block.high,
            "norm": block.norm if question.private else None,
        }
        for block in question.blocks
    ]
    if json:
        return emit(facts | {"blocks": blocks})
    show_fields(facts)
    say()
    return show_table(tuple(blocks[0]), [tuple(block.values()) for block in blocks])


class _Shown:
    """Where an answer goes: to a table, as CSV, as JSON, and to a picture."""

    def __init__(self, table: Path | None, plot: Path | None, json: bool, began: float) -> None:
        self.table, self.plot, self.json, self._began = table, plot, json, began

    def __call__(self, answer: Answer, task: str | None) -> None:
        """Show it."""
        seconds = time.monotonic() - self._began
        if self.plot is not None:
            from muster.pictures.bars import draw_answer

            draw_answer(answer).save(self.plot)
        if self.table is not None:
            from fedcore.questions.reading import as_csv

            text = as_csv(answer.columns, answer.rows, answer.errors)
            if str(self.table) == "-":
                sys.stdout.write(text)
                return None
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
            return emit(msgspec.to_builtins(facts))
        show_table(answer.columns, with_errors(answer))
        hidden = f"; {answer.hidden} groups of too few devices are not shown" if answer.hidden else ""
        remark(f"{answer.devices:,} devices answered in {seconds:.1f} s{hidden}")
        return None


def with_errors(answer: Answer) -> list[tuple[Any, ...]]:
    """The rows, with ± behind numbers that have noise."""
    if answer.errors is None:
        return [tuple(row) for row in answer.rows]
    return [
        tuple(
            value if error is None or value is None else f"{value:.6g} ± {error:.2g}"
            for value, error in zip(row, errors, strict=True)
        )
        for row, errors in zip(answer.rows, answer.errors, strict=True)
    ]
