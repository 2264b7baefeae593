"""A question to devices, from its words to its answer: compiled, explained, run as a task, and read."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET, UnsetType

from coordinator.errors import InvalidTask
from coordinator.rules.task_settings import TaskSettings
from fedcore.errors import QuestionError, visible
from fedcore.validation import build
from secagg.parameters import LEAST_COHORT

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.entities import Task
    from coordinator.rules.kinds import TaskAnswer
    from export.questions.heavy_hitters import AnyQuestion, AskedHitters
    from fedcore.bundle import Bundle
    from fedcore.plan import Field
    from fedcore.questions.answer import Answer
    from fedcore.questions.question import Question
    from muster.creating import Signs
    from simulator.population import Population


MINIMUM_DEVICES, GOAL, SELECTION_S = 20, 100, 3.0
"""Of a question: the least devices of a group that is shown, the devices that are asked, and how long it waits for all
of them before it asks those that are there."""
NOISY_BITS = 12
"""The precision of masked values with noise of devices, which cannot be added to finer ones and would hide them."""
TIMEOUT_S, LOOK_S = 600.0, 0.2
KINDS = ("float32", "int64", "int32", "uint8")
LONGEST_NAME = 60
_PLANS = 30
"""Fields are those of so many plans of a population at most."""

Note = Callable[[str], None]
"""Shows what is being done."""


class Terms(NamedTuple):
    """How an answer is protected. private: with noise. secure: masked. minimum_devices: of a group that is shown."""

    minimum_devices: int = MINIMUM_DEVICES
    private: bool = False
    secure: bool = False


class Fields(NamedTuple):
    """The fields that examples have. source: who says so."""

    fields: tuple[Field, ...]
    source: str


class Unanswered(Exception):
    """No answer came in time, or the task of the question ended without one. task: its id."""

    def __init__(self, task: str, words: str) -> None:
        super().__init__(words)
        self.task = task


def compiled(words: Sequence[str], fields: Fields, terms: Terms) -> AnyQuestion:
    """The question of SQL, or one by name with its arguments.

    Raises QuestionError, which names the place in the text and where the fields are from.
    """
    from export.questions.builtin import BUILTIN, BuiltIn, compile_built_in
    from export.questions.heavy_hitters import HEAVY_HITTERS, heavy_hitters_in_words

    first, *rest = words
    named = (*BUILTIN, HEAVY_HITTERS)
    if rest and first not in named:
        raise QuestionError(f"a question is one text in quotes, or one of {', '.join(named)} with its fields")
    try:
        if first == HEAVY_HITTERS:
            least, private, _ = terms
            return heavy_hitters_in_words(words, fields.fields, minimum_devices=least, private=private)
        if first in BUILTIN:
            return compile_built_in(BuiltIn.parse(words), fields.fields, **terms._asdict())
        from export.questions.sql import compile_sql

        return compile_sql(first, fields.fields, **terms._asdict())
    except QuestionError as error:
        raise type(error)(f"{error}\n  the fields are those {fields.source}") from error


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
            f"a field is name:type, as x:float32, v:float32:3x2 or y:uint8:10 with values below 10, not {text!r}; "
            f"types are {', '.join(KINDS)}"
        ) from None
    return Field(name, kind, shape, high)  # type: ignore[arg-type]


def fields_named(texts: Sequence[str]) -> Fields:
    """Fields in words. Raises QuestionError."""
    return Fields(tuple(map(parse_field, texts)), "that --field names")


def fields_of(store: TaskStore, population: str, like: str | None = None) -> Fields:
    """The fields of a population's examples, as its last tasks have them, or the task `like`. Raises QuestionError.

    Of two tasks the later one is believed, and one that trains more than a question, whose fields somebody may have
    named.
    """
    from coordinator.rules.kinds import kind_of
    from fedcore.plan import Plan

    if like is not None:
        return Fields(Plan.decode(store.plan_part(like)).examples.fields, f"of task {like}")
    tasks = [task for task in store.tasks() if task.settings.population == population]
    if not tasks:
        raise QuestionError(
            f"no task of population {population!r} says which fields its examples have: name them with --field, as "
            "--field x:float32 --field y:uint8:10"
        )
    trusted = sorted(tasks, key=lambda task: kind_of(task.algorithm.name) != "question")
    plans = {task.plan_sha256: task.id for task in trusted}  # by the last task of each
    found: dict[str, Field] = {}
    for task in list(plans.values())[-_PLANS:]:
        found |= {field.name: field for field in Plan.decode(store.plan_part(task)).examples.fields}
    return Fields(tuple(found.values()), f"of the last tasks of population {population}; --field names others")


def fields_in(population: Population, name: str) -> Fields:
    """The fields of a data set's examples, with the range of whole numbers that it has, if none is below 0.

    Of several labels those that are IGNORED do not count.
    """
    from fedcore.plan import IGNORED, Field
    from simulator.population import longest

    found = []
    for field, values in population.fields.items():
        if values.dtype == object:  # texts
            found.append(Field(field, "uint8", (longest(values),), 256))
            continue
        high: int | None = None
        ignored: int | UnsetType = UNSET
        if values.dtype.kind in "iu":
            several = values.ndim > 1 and values is population.labels
            known = values[values != IGNORED] if several else values
            high = None if known.min(initial=0) < 0 else int(known.max(initial=0)) + 1
            ignored = IGNORED if known.size < values.size and high is not None else UNSET
        found.append(Field(field, str(values.dtype), values.shape[1:], high, ignored=ignored))  # type: ignore[arg-type]
    return Fields(tuple(found), f"of {name}")


def check_at_once(settings: Mapping[str, Any]) -> None:
    """Raise InvalidTask for settings that mean nothing where clients of a data set answer at once, all of them."""
    for name in settings:
        if name != "secagg":  # it asks for bounds, which a fleet would need
            raise InvalidTask(f"--{name.replace('_', '-')} is for a task, and clients of a data set answer at once")


def begin(  # what is asked, of whom, and under which signature
    store: TaskStore,
    asked: AnyQuestion,
    settings: Mapping[str, Any],
    note: Note,
    *,
    formats: Sequence[str] = ("onnx",),
    sign: Signs | None = None,
) -> Task:
    """Start the task of a question; its bundle is kept nowhere else. Raises as `register_task`."""
    from muster.creating import Creation

    with tempfile.TemporaryDirectory(prefix="muster-question-") as temporary:
        note("write the plan")
        bundle = export_question(asked, Path(temporary, "plan"), formats)
        note("create the task")
        return Creation(bundle, name=name_of_task(asked), sign=sign).register(store, settings, text=True)


def name_of_task(asked: AnyQuestion) -> str:
    """What people call the task of a question."""
    return f"question: {visible(asked.text)}"[:LONGEST_NAME].rstrip()


def export_question(asked: AnyQuestion, folder: Path, formats: Sequence[str]) -> Bundle:
    """The bundle of a question, in a folder."""
    from export.build import export_bundle
    from export.model import Model

    return export_bundle(Model(asked.spec()), asked.algorithm(), folder, targets=formats)


def settings_of_question(
    asked: AnyQuestion, given: Mapping[str, Any], privacy: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The settings of a question's task: those that are given, and defaults that suit questions.

    Without a goal, a round takes whoever waits after a few seconds; it needs as many reports as a shown group needs at
    least. A device takes part once, as two answers of it would be counted twice, unless the question itself takes
    several rounds: then in each. privacy: a promise. With it no block of a report is longer than the clip, whatever a
    device sends; under masks devices add the noise, to values of few bits. Raises InvalidTask.
    """
    chosen: dict[str, Any] = {} if "goal" in given else {"goal": GOAL, "selection_timeout_s": SELECTION_S}
    chosen |= {"rounds": asked.rounds, "over_selection": 1.0, **given}
    secure, goal = chosen.get("secagg") is not None, build(TaskSettings, chosen, text=True).goal
    least = max(asked.minimum_devices, LEAST_COHORT if secure else 1)
    apart = chosen["rounds"] if asked.rounds == 1 else 1
    chosen = {"minimum": min(goal, least), "min_separation_rounds": apart, **chosen}
    if privacy is None:
        return chosen
    if not secure:
        clear = _part({"max_norm": asked.clip}, chosen.get("clear", {}))
        return {**chosen, "clear": clear, "privacy": dict(privacy)}
    secagg = _part({"clip_norm": asked.clip, "bits": NOISY_BITS}, chosen["secagg"])
    return {**chosen, "secagg": secagg, "privacy": {**privacy, "mechanism": "distributed"}}


def _part(defaults: Mapping[str, Any], given: Any) -> Any:
    """A part of the settings, with these defaults where it is a mapping; in Python it may be whole."""
    return {**defaults, **given} if isinstance(given, Mapping) else given


def wait_for(store: TaskStore, task: str, timeout_s: float, note: Note) -> None:
    """Wait until a question's task is over. Raises Unanswered when it takes longer, or is paused."""
    until = time.monotonic() + timeout_s
    while True:
        now, progress = store.task(task), store.progress_of(task)
        note(progress.sentence)
        if now.state.ended:
            return
        if now.state == "paused":
            raise Unanswered(task, f"task {task}: {progress.sentence}{given_up(store, task)}")
        if time.monotonic() >= until:
            words = f"no answer within {timeout_s:g} s: {progress.sentence}{given_up(store, task)}"
            raise Unanswered(task, f"{words}; the question stays open as task {task}")
        time.sleep(LOOK_S)


def given_up(store: TaskStore, task: str) -> str:
    """What devices said that gave up, in all attempts; empty where none did."""
    reasons = Counter[str]()
    for record in store.rounds(task):
        reasons.update(record.abort_reasons)
    said = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return f"; devices gave up: {said}" if said else ""


def read_answer(store: TaskStore, task: str) -> TaskAnswer:
    """The answer so far to the question of a task.

    Raises WrongKind for a task that asks none, and Unanswered before the first round.
    """
    found = store.answer(task)
    if found.round == 0:
        progress = store.progress_of(task)
        raise Unanswered(task, f"task {task} has no answer yet: {progress.sentence}{given_up(store, task)}")
    return found


def as_answer(found: TaskAnswer) -> Answer:
    """The same as a table."""
    from fedcore.questions.answer import Answer

    rows: Any = found.rows
    return Answer(found.columns, rows, found.devices, found.hidden_groups, found.errors)


def promise_of(epsilon: float, delta: float | None, users: int | None) -> dict[str, float | int]:
    """The settings of privacy. Raises InvalidTask where the number of users is missing."""
    if users is None:
        raise InvalidTask("--epsilon needs --users: how many devices the population has, among which one hides")
    return {"epsilon": epsilon, "delta": 1 / (10 * users) if delta is None else delta, "users": users}


_DIFFERENCES = (
    "two answers, two columns or two pieces of a sum may be subtracted, or weights make a row outweigh all others, and "
    "what is left may be one device's; only noise (--epsilon) hides that"
)
"""What no threshold hides, for people."""


class Explained(NamedTuple):
    """What is known of a question. facts: by name. blocks: of the numbers that a device sends, one for each block."""

    facts: dict[str, Any]
    blocks: list[dict[str, Any]]


def explained(asked: AnyQuestion, settings: Mapping[str, Any], formats: Sequence[str], source: str) -> Explained:
    """A question as a task with these settings asks it. source: who says which fields there are.

    Raises InvalidTask for settings that cannot be, and what an export raises.
    """
    from coordinator.rules.private_sums import report_bytes, with_least_noise

    chosen = with_least_noise(build(TaskSettings, settings, text=True))
    noise = (chosen.privacy.noise_multiplier or 0.0) if chosen.privacy else 0.0
    deviation = noise * asked.clip * math.sqrt(chosen.rounds / asked.rounds)
    kind, blocks = _of_kind(asked, deviation)
    with tempfile.TemporaryDirectory(prefix="muster-question-") as folder:
        bundle = export_question(asked, Path(folder, "plan"), formats)
        plan, proofs = bundle.plan, bundle.certificate.formats if bundle.certificate else {}
        operators = _operators(bundle)
    (only,) = plan.passes
    facts = {
        "owners_read": asked.text,
        "fields": [f"{field.name} {field.dtype}" for field in asked.fields],
        "fields_from": source,
        **kind,
        "rounds": chosen.rounds,
        "minimum_devices": asked.minimum_devices,
        "not_hidden": None if plan.report.bounded else _DIFFERENCES,
        "numbers_sent": sum(block["numbers"] for block in blocks),
        "report": report_bytes(plan.report, chosen).words,
        "plan_bytes": len(plan.encode()),
        "graph_bytes": {name: one.footprint.graph_bytes for name, one in proofs.items()},
        "operators": operators,
        "examples_of_a_step": only.loop.batch_size,
        "steps": only.loop.steps,
        "step_cpu_ms": {name: round(one.footprint.step_cpu_ms, 3) for name, one in proofs.items()},
        "sensitivity": asked.clip if plan.report.bounded else None,
        "noise_multiplier": noise or None,
        "noise_of_a_number": deviation or None,
    }
    return Explained(facts, blocks)


def _of_kind(asked: AnyQuestion, deviation: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What only one kind of question has, and the numbers that a device sends, block by block."""
    from export.questions.heavy_hitters import AskedHitters

    if isinstance(asked, AskedHitters):
        return {"rows_of_a_device": asked.hitters.values}, _votes(asked, deviation)
    question = asked.question
    return {"rows_of_a_device": question.most_rows, "groups": question.groups}, _blocks(question, deviation)


def _blocks(question: Question, deviation: float) -> list[dict[str, Any]]:
    """The bounds of every block on one device, and how far noise moves each of its sums with 95 %."""
    from fedcore.questions.answer import TIMES

    return [
        {
            "block": block.name,
            "kind": block.kind,
            "numbers": sum(question.block_sizes[name] for name in question.vectors(block)),
            "low": 0 if block.kind != "sum" else block.low,
            "high": 1 if block.kind != "sum" else block.high,
            "norm": block.norm if question.private else None,
            "error": TIMES * deviation * block.norm if deviation else None,
        }
        for block in question.blocks
    ]


def _votes(asked: AskedHitters, deviation: float) -> list[dict[str, Any]]:
    """The same of the votes of heavy hitters. deviation: of a round, as no count is of two."""
    from fedcore.questions.answer import TIMES

    votes = {"block": "votes", "kind": "any", "numbers": asked.hitters.tree.cell_count, "low": 0, "high": 1}
    norm, error = (asked.clip, TIMES * deviation) if asked.private else (None, None)
    return [votes | {"norm": norm, "error": error if deviation else None}]


def _operators(bundle: Bundle) -> dict[str, int]:
    """How many operators of each kind a step has, where there is a graph of it in ONNX."""
    import onnx

    from export.inference.onnx_model import all_nodes
    from fedcore.plan import loop_graph

    graphs = bundle.plan.graphs.get("onnx")
    if graphs is None:
        return {}
    (only,) = bundle.plan.passes
    step = onnx.load_from_string(bundle.read(graphs[loop_graph(graphs, only.name)]))
    return dict(Counter(node.op_type for node in all_nodes(step.graph)).most_common())
