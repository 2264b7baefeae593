"""Kinds of tasks: those that train, evaluate a model, or ask a question; figures and answers of the latter. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from coordinator.errors import InvalidTask, TaskEnded, UnknownRound, demand
from coordinator.rules.entities import LONGEST_NAME, Evaluates, ModelSource, RegularEvaluation, Snapshot, Task
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import MOST_COUNT, ClearReports, TaskSettings
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.evaluation import EVALUATION, PERCENTILES
from fedcore.algorithms.heavy_hitters import HeavyHitters
from fedcore.algorithms.question import QUESTION, Ask, Asking, asking_in
from fedcore.bundle import AlgorithmRef
from fedcore.errors import QuestionError
from fedcore.params import ParamSchema, VectorSpec
from fedcore.plan import Plan
from fedcore.questions.answer import Answer, check_columns
from fedcore.questions.question import Question
from fedcore.schedule import ServerSchedule

Kind: TypeAlias = Literal["training", "evaluation", "question"]
_BY_FAMILY: dict[str, Kind] = {EVALUATION: "evaluation", QUESTION: "question"}
QUESTIONS = frozenset(name for name, algorithm in ALGORITHMS.items() if algorithm.family == QUESTION)
"""The names of the algorithms that ask."""
QUIET = frozenset(_BY_FAMILY)
"""Families whose metrics do not follow each other from round to round, as the losses of a training do."""


def kind_of(algorithm: str) -> Kind:
    """The kind of a task by the name of its algorithm. One of a user's own, whose code is not at hand, trains."""
    return _BY_FAMILY.get(ALGORITHMS[algorithm].family, "training") if algorithm in ALGORITHMS else "training"


def question_of(algorithm: AlgorithmRef) -> str:
    """The question that a task with this algorithm asks, in words; empty where it asks none."""
    asking = _asking(algorithm)
    return "" if asking is None else asking.text


def least_shown(algorithm: AlgorithmRef) -> int | None:
    """The least devices of anything that the answer of a task with this algorithm shows; None where it asks nothing."""
    asking = _asking(algorithm)
    return None if asking is None else asking.minimum_devices


def _asking(algorithm: AlgorithmRef) -> Asking | None:
    asks = kind_of(algorithm.name) == "question"
    return asking_in(create(algorithm.name, algorithm.settings)) if asks else None


Scalar: TypeAlias = bool | int | float | str | None


class TaskAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the question of a task, as far as its committed rounds have one.

    question: as it was asked. round: the last one that is in it; 0 before the first. over: whether no further one
    follows. devices: that answered, once for each round. minimum_devices: groups of fewer, or none, are hidden, of
    which there are `hidden_groups`. errors: how far noise moves each number with 95 %, null for what it does not move;
    null without noise.
    """

    task: str
    question: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Scalar | tuple[Scalar, ...], ...], ...]
    devices: int
    hidden_groups: int
    minimum_devices: int
    round: int
    over: bool
    errors: tuple[tuple[float | None, ...], ...] | None = None


def task_answer(found: Answer, **facts: Any) -> TaskAnswer:
    """An answer with what is said of its task."""
    return TaskAnswer(
        columns=found.columns,
        rows=found.rows,
        devices=found.devices,
        hidden_groups=found.hidden,
        errors=found.errors,
        **facts,
    )


def check_question(settings: TaskSettings, algorithm: Algorithm) -> None:
    """Raise InvalidTask, saying what to change, unless a task with these settings can add up answers."""
    if algorithm.family != QUESTION:
        return
    if settings.buffered is not None:
        raise InvalidTask(
            f"algorithm {algorithm.name} adds up answers, and in mode buffered a device that comes back counts twice: "
            "create the task without buffered"
        )
    asking = asking_in(algorithm)
    if isinstance(asking, Ask):
        try:
            check_columns(asking.asked)
        except QuestionError as error:
            raise InvalidTask(f"the question has no answer: {error}") from error
    if isinstance(asking, HeavyHitters) and settings.rounds != asking.tree.rounds:
        raise InvalidTask(
            f"heavy hitters of {asking.of} take {asking.tree.rounds} rounds, not {settings.rounds}: after fewer no "
            "long value is whole, and further ones find nothing"
        )
    wording = "mean with a question: its answer is a sum over devices"
    demand(settings.clear.estimator == "mean", "estimator", wording, settings.clear.estimator)
    if settings.privacy is not None:
        wording = "gaussian, or distributed with secagg, in a question: other noise is taken back by later rounds"
        mechanism = settings.privacy.mechanism
        demand(mechanism in ("gaussian", "distributed"), "mechanism", wording, mechanism)


def minimum_devices(algorithm: Algorithm) -> int:
    """The least devices of a group that is shown; 1 where the algorithm hides none."""
    asking = asking_in(algorithm)
    return 1 if asking is None else asking.minimum_devices


def question_in(algorithm: Algorithm) -> Question | None:
    """The question of an algorithm that takes any; None of another one."""
    asking = asking_in(algorithm)
    return asking.asked if isinstance(asking, Ask) else None


def answers_twice(settings: TaskSettings, algorithm: Algorithm) -> bool:
    """Whether a device may answer in several rounds of a task, and then counts once for each.

    Not of heavy hitters, of which every round asks something else.
    """
    return settings.rounds > settings.min_separation_rounds and question_in(algorithm) is not None


# Evaluations: the models that a task evaluates, figures as a table, and rollback to an earlier model. Pure.


class Interval(NamedTuple):
    """A mean, and the ends of its interval of 95 %, which one device alone has none of."""

    mean: float
    low: float | None
    high: float | None

    @property
    def words(self) -> str:
        """The interval; empty without one."""
        return "" if self.low is None or self.high is None else f"{self.low:.4g} to {self.high:.4g}"


class Row(NamedTuple):
    """The figures of a metric. percentiles: over devices, of `PERCENTILES`. improved: the share of devices, 0 to 1."""

    metric: str
    over_examples: Interval | None
    over_devices: Interval | None
    percentiles: tuple[float, ...]
    improved: float | None


class Figures(NamedTuple):
    """What an evaluation found. kind: evaluate, compare or personalisation; counts: of devices and of examples."""

    kind: str
    devices: int
    examples: int
    rows: tuple[Row, ...]

    @property
    def sentence(self) -> str:
        """What the means are of."""
        counted = f"{self.devices:,} devices with {self.examples:,} examples"
        if self.kind == "evaluate":
            return f"on {counted}, with intervals of 95 %; a tenth of the devices is below p10, and so on"
        what = (
            "evaluated model minus the other" if self.kind == "compare" else "after training on the device minus before"
        )
        return f"differences, {what}, on {counted}; an interval of 95 % with 0 in it shows no difference"


def figures_of(kind: str, metrics: Mapping[str, float]) -> Figures | None:
    """The figures that an algorithm called `kind` left among the metrics of a round; None where it left none."""
    devices = metrics.get(f"{kind}.devices")
    rows = tuple(_row(f"{kind}.{name}", name, metrics) for name in _names(kind, metrics))
    if devices is None or not rows:  # a question leaves its devices alone
        return None
    return Figures(kind, int(devices), int(metrics.get(f"{kind}.examples", 0)), rows)


def means_of(kind: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without the details of figures: intervals, percentiles and counts."""
    if f"{kind}.devices" not in metrics:
        return dict(metrics)
    return {name: metrics[name] for name in (f"{kind}.{metric}" for metric in _names(kind, metrics)) if name in metrics}


def _names(kind: str, metrics: Mapping[str, float]) -> list[str]:
    own = [name.removeprefix(f"{kind}.") for name in metrics if name.startswith(f"{kind}.")]
    return sorted({name.partition(".")[0] for name in own} - {"devices", "examples"})


def _row(name: str, metric: str, metrics: Mapping[str, float]) -> Row:
    found = tuple(metrics[place] for place in (f"{name}.p{percent}" for percent in PERCENTILES) if place in metrics)
    over = _interval(name, metrics), _interval(f"{name}.devices", metrics)
    return Row(metric, *over, found, metrics.get(f"{name}.improved"))


def _interval(name: str, metrics: Mapping[str, float]) -> Interval | None:
    if name not in metrics:
        return None
    return Interval(metrics[name], metrics.get(f"{name}.low"), metrics.get(f"{name}.high"))


VECTORS = {"model": "params", "against": "other"}
"""The vector of the server state that holds each of the models."""


def sources(evaluates: Evaluates) -> dict[str, ModelSource]:
    """Where the evaluated models came from, by the vector of the server state that holds each."""
    named = msgspec.structs.asdict(evaluates)
    return {VECTORS[name]: source for name, source in named.items() if source is not None}


def check_evaluates(algorithm: Algorithm, state: tuple[VectorSpec, ...], against: ModelSource | None) -> None:
    """Raise InvalidTask unless the algorithm, with such a state, evaluates a model, or two with one to compare with."""
    if algorithm.family != EVALUATION:
        raise InvalidTask(
            f"{algorithm.name} trains a model and does not evaluate one: export the model with --algorithm=evaluate, "
            "compare or personalisation"
        )
    compares = VECTORS["against"] in [spec.name for spec in state]
    if compares and against is None:
        raise InvalidTask(f"{algorithm.name} needs a second model, to compare with: name it with --against")
    if not compares and against is not None:
        raise InvalidTask(f"{algorithm.name} evaluates one model: leave --against out, or export with compare")


def check_same_model(source: Task, its_plan: Plan, plan: Plan, settings: TaskSettings) -> None:
    """Raise InvalidTask unless a task with these settings and this plan may evaluate a model of the task `source`."""
    check_same_tensors(f"task {source.id}", its_plan, plan)
    if source.settings.privacy is not None and settings.privacy is None:
        raise InvalidTask(
            f"evaluation of a private task without noise is refused: task {source.id} promises privacy; give this one "
            "a budget too, --privacy"
        )


def check_same_tensors(training: str, its_plan: Plan, plan: Plan) -> None:
    """Raise InvalidTask unless this plan is for models that a task, in words, trains with its own plan."""
    if its_plan.schema != plan.schema:
        difference = _first_difference(its_plan.schema, plan.schema)
        raise InvalidTask(f"{training} trains another model than the bundle's plan: {difference}")
    if its_plan.frozen != plan.frozen:
        raise InvalidTask(f"{training} has other frozen tensors than the bundle's plan: export it from that model")


def _first_difference(theirs: ParamSchema, ours: ParamSchema) -> str:
    """The first tensor in which two models differ, in words."""
    for one, other in zip_longest(theirs.tensors, ours.tensors):
        if one != other:
            there, here = ("none" if it is None else f"{it.name} {list(it.shape)}" for it in (one, other))
            return f"it has the tensor {there}, the plan {here}"
    return f"it keeps {list(theirs.local)} on devices, the plan {list(ours.local)}"


def check_regular(
    settings: TaskSettings, training: Algorithm, measuring: Algorithm, state: tuple[VectorSpec, ...]
) -> None:
    """Raise InvalidTask unless `measuring`, with such a state, can regularly evaluate models of a task.

    settings, training: the settings of that task and its algorithm.
    """
    what = "evaluation after every N rounds"
    if VECTORS["against"] in [spec.name for spec in state]:
        raise InvalidTask(f"{what} is of one model, and {measuring.name} compares two: export with evaluate")
    check_evaluates(measuring, state, None)
    if training.family == EVALUATION:
        raise InvalidTask(f"{what} is for tasks that train, and {training.name} evaluates: create it without")
    if training.family == QUESTION:
        raise InvalidTask(f"{what} is for tasks that train, and {training.name} asks: create it without")
    if not settings.hold_out_devices or settings.on_held_out:
        raise InvalidTask(
            f"{what} runs on held-out devices, so that it measures on none that trained and delays no round: set "
            "hold_out_devices above 0, and leave on_held_out out"
        )
    if settings.privacy is not None:
        raise InvalidTask(
            f"{what} is refused with privacy: each would need noise and a budget of its own; create evaluations by "
            "hand, with --evaluate and --privacy"
        )


def settings_of_regular(training: TaskSettings, number: int) -> TaskSettings:
    """The settings of an evaluation of the model after a round: one round, with the goal of that round.

    What concerns training alone, such as bounds on updates and mode buffered, is as by default.
    """
    return replace(
        training.in_round(number),
        rounds=1,
        on_held_out=True,
        clear=ClearReports(),
        schedule=ServerSchedule(),
        same_cohort=False,
        buffered=None,
        starts_at=None,
        starts_from=None,
    )


def regular_task(training: Task, regular: RegularEvaluation, number: int, start: Snapshot, id_: str, at: float) -> Task:
    """The task that evaluates the model of a training after round `number`, under the same release, if any.

    start: with the signed entry of that round, under a release. at: now, in seconds since 1970.
    """
    bundle, ending = regular.bundle, f", round {number}"
    return Task(
        id=id_,
        name=training.name[: LONGEST_NAME - len(ending)] + ending,
        bundle=bundle.name,
        state=TaskState.ACTIVE,
        reason="",
        settings=settings_of_regular(training.settings, number),
        algorithm=bundle.algorithm,
        plan_sha256=bundle.plan.sha256,
        plan_signature=bundle.signature,
        certificate_sha256=bundle.certificate.sha256,
        release=training.release,
        initial=start,
        created_at=at,
        evaluates=Evaluates(ModelSource(task=training.id, round=number), lineage=start.lineage),
    )


def check_rollback(last: int, to: int, trips: int) -> None:
    """Raise UnknownRound unless a task whose last round is `last` can go on from the model after round `to`.

    The rollback is itself a round, and what was broadcast after `to` is for the trip that came next then. trips: of the
    task's algorithm.
    """
    if (last + 1 - to) % trips:
        # Of two trips the first leaves the model as it is: it is the same after round 2k and after round 2k + 1.
        same = to - 1 if to % 2 else to + 1
        raise UnknownRound(
            f"rounds of this task take {trips} trips in turn, and the next round's does not go on from round {to}; "
            f"round {same} led to the same model: roll back to that one"
        )


def rounds_after(rounds: int, number: int, to: int) -> int:
    """The rounds of a task once round `number` of it is a rollback to the model after `to`: it gets those again."""
    return min(rounds + number - to, MOST_COUNT)


def check_clients(task: Task) -> None:
    """Raise TaskEnded when the server's vectors are the mean of those on devices, which no rollback reaches."""
    if task.settings.clients is not None:
        raise TaskEnded(
            f"devices keep vectors for task {task.id}, of which its server state is the mean, and a rollback does not "
            "reach them: cancel it, and start another task from that model"
        )


def check_participations(task: Task) -> None:
    """Raise TaskEnded when the privacy of a task counts on rounds between participations: a rollback has no devices."""
    settings = task.settings
    if settings.privacy is not None and settings.min_separation_rounds > 1:
        raise TaskEnded(
            f"the privacy of task {task.id} counts on {settings.min_separation_rounds} rounds of devices from one "
            "participation to the next, and a rollback is a round without devices: cancel it, and start another task "
            "from that model, to whose own ε that of the task so far is added"
        )
