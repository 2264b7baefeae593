"""`muster task`: what an operator does with tasks, on the coordinator's own store or through its admin API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from coordinator.rules.states import RoundState
from coordinator.rules.task_settings import TaskSettings
from fedcore.validation import build
from muster import options as task_options
from muster.commands.stores import Blobs, Database, Remote, given_again, located, open_store, with_store
from muster.creating import (
    FIRST_COUNTER,
    VALID_DAYS,
    Creation,
    Evaluated,
    Signs,
    matching,
    read_release,
    release_facts,
    released_for,
    starting_from,
)
from muster.options import TaskId
from muster.output import Json, answer, at_utc, emit, remark, say, say_next, show_fields, show_table

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.entities import Task
    from coordinator.rules.progress import Progress
    from coordinator.settings import Settings
    from coordinator.store.tasks import CoordinatorStore
    from fedcore.bundle import Bundle
    from fedcore.release import Signed


# `muster task watch`: the figures of rounds and evaluations as they are committed.


EVERY_S = 2.0


def figures(store: TaskStore, task: str, every_s: float = EVERY_S) -> Iterator[tuple[int, dict[str, int | float]]]:
    """The number of every committed round with its figures, and with those of evaluations of its model, once they end.

    From the first round, until the task and its evaluations are over. every_s: seconds between looks.
    """
    told: set[tuple[int, str]] = set()
    while True:
        over = store.task(task).state.ended  # looked at before the rounds: none follows
        evaluations = store.evaluations(task)
        done = [
            (one.number, "", one.metrics, one.seconds)
            for one in store.rounds(task)
            if one.state is RoundState.COMMITTED
        ]
        done += [(one.round, one.task, one.metrics, None) for one in evaluations if one.state.ended and one.metrics]
        for number, by, metrics, seconds in sorted(done, key=lambda each: each[:2]):
            if (number, by) not in told:
                told.add((number, by))
                yield number, metrics | ({} if seconds is None else {"seconds": seconds})
        if over and all(one.state.ended for one in evaluations):
            return
        time.sleep(every_s)


@with_store
def watch(
    *,
    task: TaskId,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the watch, for the next two.")] = None,
    tensorboard: Annotated[bool, typer.Option(help="Write every figure for TensorBoard, below --out.")] = False,
    mlflow: Annotated[bool, typer.Option(help="Log to MLflow, at MLFLOW_TRACKING_URI.")] = False,
    store: TaskStore,
) -> None:
    """Show every round as it is committed, until the task is over.

    The names of figures are those of `muster simulate`, and their step is the round. This process tells TensorBoard and
    MLflow, never the coordinator. With the same --out a later watch goes on where this one ended, and nothing is there
    twice.
    """
    from coordinator.dashboard.new_task import values
    from coordinator.rules.kinds import question_of
    from simulator.runs.trackers import trackers

    if out is None and (tensorboard or mlflow):
        raise typer.BadParameter(
            "they keep what they logged in a folder: give --out DIR", param_hint="--tensorboard/--mlflow"
        )
    facts = store.task(task)
    parameters = {"task": task, "name": facts.name, "algorithm": facts.algorithm.name, **values(facts.settings)}
    if question := question_of(facts.algorithm):
        say(f"asks: {question}")
    with ExitStack() as stack:
        told = []
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            told = trackers(out, parameters, "watch again", tensorboard=tensorboard, mlflow=mlflow)
        for tracker in told:
            stack.enter_context(closing(tracker))
        for number, point in figures(store, task):
            say(f"round {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(point.items())))
            for tracker in told:
                tracker(number, point)
    say(store.progress_of(task).sentence)
    if question:
        say_next("read its answer", ["muster", "ask", "--task", task])


# `muster task`: what an operator does with tasks, on the coordinator's own store or through its admin API.


task_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Create and operate tasks.\n\n"
    "Run it where the coordinator's files are, or over HTTP with --coordinator and a token in MUSTER_TOKEN.",
)

# Placeholders in suggested commands.
FIRST_TASK = ("--population", "demo", "--goal", "20", "--rounds", "10")


@task_app.command()
@task_options.with_task_settings
def create(
    *,
    plan: Annotated[Path | None, typer.Option(help="The plan bundle.  [default: that of --like]")] = None,
    settings: dict[str, Any],
    like: task_options.LikeTask = None,
    unset: task_options.Unset = None,
    name: Annotated[str | None, typer.Option(help="Name for people.  [default: the bundle's]")] = None,
    evaluate: task_options.EvaluatedModel = None,
    against: task_options.ComparedModel = None,
    evaluate_every: task_options.EvaluateEvery = None,
    evaluation: task_options.EvaluationBundle = None,
    release: task_options.ReleaseFile = None,
    release_key: task_options.ReleaseKey = None,
    release_counter: task_options.ReleaseCounter = FIRST_COUNTER,
    release_days: task_options.ReleaseDays = VALID_DAYS,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """Start a task on a plan bundle.

    With --secagg it needs a release. With --evaluate, devices measure a model by a bundle that evaluates.
    docs/settings.md explains the settings.
    """
    from coordinator.rules.aggregation import in_words
    from coordinator.rules.private_sums import device_noise, report_bytes
    from coordinator.store.tasks import CoordinatorStore
    from fedcore.bundle import Bundle
    from fedcore.plan import Plan
    from muster.releasing_models import refused_by_default

    evaluated = Evaluated(evaluate, against, evaluate_every, None if evaluation is None else Bundle(evaluation))
    if plan is not None and like is None:  # what is wrong with a setting is said before any file is opened
        build(TaskSettings, evaluated.settings(settings), text=True)
    own = None if plan is None else Bundle(plan)
    signed = None if release is None else read_release(release)
    with open_store(db, blobs, coordinator) as store:
        sign = signer(store, db, release_key, counter=release_counter, days=release_days)
        creation = Creation(own, like, unset or (), evaluated, name, signed, sign)
        task = creation.register(store, settings, text=True)
        begun = Plan.decode(store.plan_part(task.id))
        _describe(store, task.id, json, device_noise(begun.report, task.settings))
        for sentence in matching(store, task.settings):
            remark(sentence)
        url = _devices_url(store, located(db)) if isinstance(store, CoordinatorStore) else None
    if not json:
        remark(f"A report has {report_bytes(begun.report, task.settings).words}.{in_words(begun, task.settings)}")
        if refused := refused_by_default(begun):
            remark(refused)
        _say_next(task, url, given_again(db=db, blobs=blobs, coordinator=coordinator))


@task_app.command()
@task_options.with_task_settings
def release(
    *,
    plan: Annotated[Path, typer.Option(help="The plan bundle to release.")],
    settings: dict[str, Any],
    release_key: Annotated[Path, typer.Option(metavar="KEYFILE", help="The private key, from `muster key new`.")],
    release_counter: task_options.ReleaseCounter = FIRST_COUNTER,
    release_days: task_options.ReleaseDays = VALID_DAYS,
    evaluate: task_options.EvaluatedModel = None,
    against: task_options.ComparedModel = None,
    evaluate_every: task_options.EvaluateEvery = None,
    evaluation: task_options.EvaluationBundle = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("release.json"),
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """Write the signed release of a secure task to a file.

    No task is created. Use it if you hold the key and are not the operator: the operator gives the file to `muster task
    create --release`, or to the dashboard's form of a new task. The release holds only for this bundle, this population
    and these bounds on sums; with --evaluate-every also for the bundle of --evaluation, on models of that task. Read
    what `muster plan show` says of the bundles before you sign.
    """
    from fedcore.bundle import Bundle

    evaluated = Evaluated(evaluate, against, evaluate_every, None if evaluation is None else Bundle(evaluation))
    chosen = build(TaskSettings, evaluated.settings(settings), text=True)
    if chosen.secagg is None:
        raise typer.BadParameter("a task without --secagg needs no release", param_hint="--secagg")
    terms = {"counter": release_counter, "days": release_days}
    with open_store(db, blobs, coordinator) as store, starting_from(store, Bundle(plan), evaluated) as (bundle, of):
        signed = _release(store, db, bundle, chosen, release_key, evaluation=of, **terms)
    out.write_bytes(msgspec.json.encode(signed))
    answer({"file": str(out), **release_facts(signed)}, json)


@task_app.command("list")
@with_store
def list_tasks(*, store: TaskStore, json: Json = False) -> None:
    """List every task, oldest first, and why each is where it is."""
    tasks, progress = store.tasks(), {progress.task: progress for progress in store.progress()}
    if json:
        emit([_facts(task, progress[task.id]) for task in tasks])
    else:
        from coordinator.rules.kinds import kind_of

        rows = [
            (
                t.id,
                t.name,
                kind_of(t.algorithm.name),
                t.settings.population,
                t.state,
                t.settings.goal,
                t.settings.rounds,
            )
            for t in tasks
        ]
        show_table(("task", "name", "kind", "population", "state", "goal", "rounds"), rows)
        show_fields({task.id: progress[task.id].sentence for task in tasks})


@task_app.command()
@with_store
def show(*, task: task_options.TaskId, store: TaskStore, json: Json = False) -> None:
    """Show a task's settings and state, and why it is where it is."""
    _describe(store, task, json)


@task_app.command()
@with_store
def metrics(*, task: task_options.TaskId, store: TaskStore, json: Json = False) -> None:
    """Show what became of every attempt at every round.

    For each attempt: how many devices reported, why others gave up, how training went. Then the evaluations of its
    models, by round. Then counts of sessions by what became of them, step by step: the task's own, and those of its
    population without a task.
    """
    from muster.round_tables import show_rounds

    rounds, sessions, progress = store.rounds(task), store.sessions(task), store.progress_of(task)
    evaluations = store.evaluations(task)
    if json:
        found = {"rounds": rounds, "evaluations": evaluations, "sessions": sessions}
        emit(msgspec.to_builtins(found))
        return
    if rounds:
        show_rounds(rounds, store.task(task).algorithm.name)
    else:
        say(f"no round has begun: {progress.sentence}")
    if evaluations:
        say()
        names = list(dict.fromkeys(name for one in evaluations for name in one.means))
        columns = ("round", "evaluated by", "state", *(name.replace(".", " ") for name in names))
        show_table(columns, [(one.round, one.task, one.state, *map(one.means.get, names)) for one in evaluations])
    if sessions:
        say()
        show_table(("sessions", "what became of them"), [(shape.count, shape.shape) for shape in sessions])


task_app.command()(watch)


@task_app.command()
@with_store
def history(*, task: task_options.TaskId, store: TaskStore, json: Json = False) -> None:
    """Show what was done to a task, by whom and when."""
    changes = store.history(task)
    if json:
        emit([asdict(change) for change in changes])
    else:
        rows = [(at_utc(change.at), change.after, change.cause) for change in changes]
        show_table(("when", "state", "cause"), rows)


@task_app.command()
@with_store
def pause(*, task: task_options.TaskId, store: TaskStore, json: Json = False) -> None:
    """Open no new round; the running one finishes."""
    store.pause(task)
    _tell(store, task, json)


@task_app.command()
@with_store
def resume(*, task: task_options.TaskId, store: TaskStore, json: Json = False) -> None:
    """Take up a paused task."""
    store.resume(task)
    _tell(store, task, json)


@task_app.command()
@with_store
def cancel(*, task: task_options.TaskId, store: TaskStore, json: Json = False) -> None:
    """End a task and abandon its running round.

    Committed rounds stay.
    """
    store.cancel(task)
    _tell(store, task, json)


@task_app.command()
@with_store
def rollback(
    *,
    task: task_options.TaskId,
    round_number: Annotated[int, typer.Option("--round", min=0, help="The round whose model it is; 0 is the start.")],
    store: TaskStore,
    json: Json = False,
) -> None:
    """Go back to the model after an earlier round.

    The task must be paused, and goes on from that model when it is resumed. Rounds committed since stay in its history;
    their models are removed in time, as for every task.
    """
    store.roll_back(task, round_number)
    _tell(store, task, json)


@task_app.command()
def checkpoint(
    task: task_options.TaskId,
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file that is there.")] = False,
    round_number: Annotated[
        int | None, typer.Option("--round", help="The round whose model it is.  [default: the last]")
    ] = None,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """Write the model after a round to a file.

    The file has safetensors' format: named tensors, which torch can load. For a private task its certificate is written
    beside it, as FILE.privacy.json, which `muster privacy verify` checks.
    """
    import safetensors.numpy

    from fedcore.privacy.settings import certificate_file, decode_certificate

    if out.is_file() and not force:
        raise typer.BadParameter(f"{out} exists; name another file, or replace it with --force", param_hint="--out")
    with open_store(db, blobs, coordinator) as store:
        certified = None
        if store.task(task).settings.privacy is not None:
            certified = store.certificate(task, round_number)
            # By now there may be a later round.
            round_number = decode_certificate(certified.certificate.text).round
        model = store.model(task, round_number)
    out.write_bytes(model)
    size = sum(tensor.size for tensor in safetensors.numpy.load(model).values())
    facts: dict[str, Any] = {"task": task, "file": str(out), "parameters": size}
    if certified is not None:
        certificate_file(out).write_bytes(certified.encode())
        facts["certificate"] = str(certificate_file(out))
    answer(facts, json)


def _release(
    store: TaskStore, db: str | None, bundle: Bundle, settings: TaskSettings, key: Path, **more: Any
) -> Signed:
    """The release that a key in a file signs. more: as of `released`."""
    from fedcore.signing import SigningKey

    return released_for(store, bundle, settings, SigningKey.load(key), located(db).algorithm_modules, **more)


def signer(store: TaskStore, db: str | None, key: Path | None, **terms: Any) -> Signs | None:
    """What signs releases with a key in a file, if one is named. terms: as of `released`."""
    if key is None:
        return None
    return lambda bundle, settings, of: _release(store, db, bundle, settings, key, evaluation=of, **terms)


def _say_next(task: Task, url: str | None, where: list[str]) -> None:
    settings = task.settings
    selected = settings.policy.cohort
    fleet = ["muster", "fleet", "run", "--coordinator", url, "--population", settings.population]
    if task.release is not None:
        fleet += ["--signer", task.release.signer]
    if url is not None:
        say_next("start emulated devices", [*fleet, "--devices", max(60, selected), "--concurrency", selected])
    say_next("see how its rounds go", ["muster", "task", "metrics", task.id, *where])


def _devices_url(store: CoordinatorStore, settings: Settings) -> str:
    """Where devices are served: by a coordinator that runs on the store, else as the settings say."""
    with store.database.reading() as records:
        running = [replica.url for replica in records.leases.replicas()]
    return running[0] if running else f"http://{settings.host}:{settings.port}"


def _facts(task: Task, progress: Progress) -> dict[str, Any]:
    from coordinator.rules.kinds import kind_of, question_of

    regular, question = task.evaluation, question_of(task.algorithm)
    return {
        "task": task.id,
        "name": task.name,
        "kind": kind_of(task.algorithm.name),
        **({"question": question} if question else {}),
        "bundle": task.bundle,
        "state": task.state,
        "reason": task.reason,
        "progress": {"reason": progress.reason, "sentence": progress.sentence, "stalled": progress.stalled},
        "algorithm": task.algorithm,
        **({} if task.evaluates is None else {"evaluates": task.evaluates.words}),
        **({} if regular is None else {"evaluate_every": regular.every, "evaluation": regular.bundle.name}),
        "plan_sha256": task.plan_sha256,
        "signer": task.plan_signature and task.plan_signature.signer,
        "release": task.release and release_facts(task.release),
        "mode": task.settings.mode,
        **({"runs_on": task.settings.wanted} if task.settings.where else {}),
        **msgspec.to_builtins(task.settings),
    }


def _tell(store: TaskStore, task_id: str, json: bool) -> None:
    """Print the state of a task that a command changed; as JSON, all its facts."""
    if json:
        return _describe(store, task_id, json)
    task, progress = store.task(task_id), store.progress_of(task_id)
    return show_fields({"task": task.id, "name": task.name, "state": task.state, "progress": progress.sentence})


def _spent_before(store: TaskStore, task: Task) -> str | None:
    """What the tasks before this one have spent, in words; None where there are none."""
    from coordinator.errors import UnknownTask
    from coordinator.store.starting import spent_before

    try:
        spent = spent_before(store, task.settings)
    except UnknownTask:
        return f"unknown: task {task.settings.starts_from} is of a population that this token may not see"
    return None if spent is None else spent.words


def _describe(store: TaskStore, task_id: str, json: bool, noise: str = "") -> None:
    """noise: what devices add to their reports, in words."""
    task, progress = store.task(task_id), store.progress_of(task_id)
    facts = _facts(task, progress) | ({"noise_of_devices": noise} if noise else {})
    if task.settings.privacy is not None:
        spent = store.spent(task_id)
        facts["privacy_spent"] = {"rounds": len(spent), "epsilon": spent[-1].epsilon if spent else 0.0}
    if (spent_there := _spent_before(store, task)) is not None:
        facts["spent_before"] = spent_there
    if json:
        emit(facts)
    else:
        of_algorithm = {"algorithm": task.algorithm.name, "algorithm_settings": task.algorithm.settings}
        rules = {
            name: {rule: least for rule, least in facts[name].items() if least} for name in ("requires", "on_device")
        }
        show_fields(facts | of_algorithm | rules | {"progress": progress.sentence})
