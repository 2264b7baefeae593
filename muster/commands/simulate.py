"""`muster simulate`: the vectorised engine on a data set with users."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack, closing, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from muster.compress_option import COMPRESS
from muster.output import (
    Json,
    Settings,
    emit,
    loading,
    parse_settings,
    progress,
    show_fields,
    stderr,
)
from muster.schedule_option import Schedule, parse_schedule

ALGORITHM = "An algorithm (`muster algorithms list`), or your own as package.module:Class.  [default: fedavg]"
DATASET = (
    "A data set by name (`muster data list`), package.module:function, or a path to npz or Parquet files.  "
    "[default: digits]"
)
PARTITION = (
    "How examples are dealt to clients: dirichlet:ALPHA, pachinko:ALPHA,BETA, shards:PER_CLIENT, quantity:BETA or "
    "shuffled; by default by user, or dirichlet:0.3 where there are no users."
)
CLIENTS = "To how many clients; without --partition so many of the users, drawn.  [default: all]"
BASELINE = (
    "Instead of federated training: pooled (one client has all examples), local (every user alone), or dane, cocoa, "
    "sparse_fsvrg (models ridge, logistic)."
)

ENGINE = (
    "What trains users: torch, several at once; graphs, one by one on what devices run, after an export of seconds; or "
    "auto, which measures a few steps of both where that pays and keeps the figures in your cache.  [default: auto]"
)
RUN = "A new folder that keeps the run: its configuration, a line of metrics for each round, checkpoints, the result."
RESUME = (
    "The folder of a run that was ended, by whatever: go on from its last checkpoint, to the same bits. Needs no other "
    "option."
)
TARGET = "End when held-out users reach this accuracy, from 0 to 1."
PATIENCE = "End when their loss has not fallen for so many rounds."
TENSORBOARD = "Write the run's figures for TensorBoard too, in the folder tensorboard of the run."
MLFLOW = "Log the run to MLflow too, where MLFLOW_TRACKING_URI says."
PROCESSES = "Processes that train, on the CPU; their number changes no result.  [default: one for each core]"

RAY = (
    "Train on the workers of a Ray cluster: that of this machine (auto), a new one on this machine (local), or the one "
    "at HOST:PORT. --processes is then how many.  [default: one for each of its CPUs]"
)

if TYPE_CHECKING:
    from rich.progress import Progress

    from simulator.course import Point
    from simulator.runs.trackers import MLflow, TensorBoard
    from simulator.simulation import OnRound, SimulationConfig, SimulationResult


def simulate(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Options by name, and [settings]; flags override.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A built-in model or package.module:function.")] = None,
    dataset: Annotated[str | None, typer.Option(help=DATASET)] = None,
    data: Annotated[Path | None, typer.Option(help="The folder that holds data sets on disk.")] = None,
    partition: Annotated[str | None, typer.Option(help=PARTITION)] = None,
    clients: Annotated[int | None, typer.Option(help=CLIENTS)] = None,
    algorithm: Annotated[str | None, typer.Option(help=ALGORITHM)] = None,
    baseline: Annotated[str | None, typer.Option(help=BASELINE)] = None,
    settings: Settings = None,
    schedule: Schedule = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds to run.  [default: 100]")] = None,
    cohort: Annotated[int | None, typer.Option(help="Users per round.  [default: 10]")] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Rounds between two measurements on held-out users.  [default: 10]")
    ] = None,
    target_accuracy: Annotated[float | None, typer.Option(help=TARGET)] = None,
    patience: Annotated[int | None, typer.Option(metavar="ROUNDS", help=PATIENCE)] = None,
    engine: Annotated[str | None, typer.Option(help=ENGINE)] = None,
    same_cohort: Annotated[
        bool | None, typer.Option("--same-cohort", help="Of an algorithm of two trips: the same users in both.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: cpu or cuda.  [default: cpu]")] = None,
    processes: Annotated[int | None, typer.Option(help=PROCESSES)] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help=RAY)] = None,
    compress: Annotated[str | None, typer.Option(metavar="STEPS", help=COMPRESS)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of split, weights, cohorts, order.  [default: 0]")] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help=RUN)] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help=RESUME)] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help=TENSORBOARD)] = False,
    mlflow: Annotated[bool, typer.Option("--mlflow", help=MLFLOW)] = False,
    json: Json = False,
) -> None:
    """Train over simulated users, measure on users never seen.

    Or run a baseline for comparison. Users are split into train and held-out ones; accuracy is per example over all
    held-out users, and per user as percentiles. The same seed and engine give the same model, bit for bit, on the same
    machine. For example, first a try, then a run that survives a kill:

    \b
      muster simulate --model mlp --algorithm fedadam --rounds 20
      muster simulate --model mlp --algorithm fedadam --rounds 500 --run runs/a
      muster simulate --resume runs/a
    """
    flags: dict[str, Any] = {
        "model": model,
        "dataset": dataset,
        "data": data,
        "partition": partition,
        "clients": clients,
        "algorithm": algorithm,
        "baseline": baseline,
        "rounds": rounds,
        "cohort": cohort,
        "evaluate_every": evaluate_every,
        "target_accuracy": target_accuracy,
        "patience": patience,
        "engine": engine,
        "same_cohort": same_cohort,
        "device": device,
        "processes": processes,
        "ray": ray,
        "compress": compress,
        "seed": seed,
    }
    if schedule:
        flags["schedule"] = parse_schedule(schedule)
    folder = run or resume
    if run is not None and resume is not None:
        raise typer.BadParameter("start a run with --run or go on with one, not both", param_hint="--resume")
    if folder is None and (tensorboard or mlflow):
        raise typer.BadParameter(
            "only a run in a folder is logged: give --run DIR", param_hint="--tensorboard/--mlflow"
        )
    if resume is not None and not (resume / "config.toml").is_file():
        raise typer.BadParameter(f"{resume} is not the folder of a run: it has no config.toml", param_hint="--resume")
    files = [resume / "config.toml" if resume else None, config]
    options = _options([path for path in files if path], flags, parse_settings(settings))
    where = _Where(run, resume, tensorboard, mlflow)
    try:
        result = _simulated(options, where)
    except KeyboardInterrupt:
        if folder is not None and (folder / "config.toml").is_file():
            stderr.print(f"go on with --resume {folder}", markup=False, soft_wrap=True, highlight=False)
        raise
    return emit(result) if json else _show(result, folder)


def _show(result: SimulationResult, folder: Path | None) -> None:
    facts = dataclasses.asdict(result)
    del facts["curve"]
    if not result.excluded:
        del facts["excluded"]
    show_fields(facts)
    if folder is not None:
        stderr.print(f"run: {folder}", soft_wrap=True, highlight=False)


class _Where(NamedTuple):
    """Where a simulation is kept: in a new folder, in that of a run to resume, or in none; and what else is told."""

    run: Path | None
    resume: Path | None
    tensorboard: bool
    mlflow: bool


def _simulated(options: dict[str, Any], where: _Where) -> SimulationResult:
    """The simulation that the options ask for, in a folder or without; shows how far it is."""
    with loading():
        from simulator.runs.running import resume_run, start_run
        from simulator.simulation import simulate

    chosen = _configuration(options)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # what a user's own code and Ray print is not the result
        trackers = [stack.enter_context(closing(tracker)) for tracker in _trackers(where, chosen)]
        shown = _shown_in(stack.enter_context(progress()), chosen)

        def on_round(number: int, point: Point) -> None:
            for hear in (shown, *trackers):
                hear(number, point)

        if where.run is not None:
            return start_run(where.run, chosen, on_round)
        if where.resume is not None:
            return resume_run(where.resume, chosen, on_round)
        return simulate(chosen, on_round)


def _trackers(where: _Where, config: SimulationConfig) -> list[TensorBoard | MLflow]:
    """What else hears of every round."""
    from simulator.runs.trackers import MLflow, TensorBoard

    folder = where.run or where.resume
    if folder is None:
        return []
    asked = (where.tensorboard, lambda: TensorBoard(folder)), (where.mlflow, lambda: MLflow(folder, config))
    return [make() for wanted, make in asked if wanted]


def _shown_in(bar: Progress, config: SimulationConfig) -> OnRound:
    """What shows every round in a bar: the training loss, and what held-out users measured last."""
    task = bar.add_task(f"{config.model} · {config.baseline or config.algorithm}", total=config.rounds, note="")
    measured: dict[str, str] = {}

    def on_round(number: int, point: Point) -> None:
        loss = next(value for name, value in point.items() if name.endswith(".loss"))
        for name, words in (("test.loss", "held-out loss"), ("test.accuracy", "accuracy")):
            if name in point:
                measured[name] = f"{words} {point[name]:.3f}"
        bar.update(task, completed=number, note=", ".join([f"train loss {loss:.3f}", *measured.values()]))

    return on_round


def _options(paths: Sequence[Path], flags: dict[str, Any], settings: dict[str, object]) -> dict[str, Any]:
    """The options of files, later ones before earlier ones, overridden by the flags.

    A wrong algorithm is reported before torch is loaded. A baseline may have other settings, which are looked at
    later.
    """
    from fedcore.algorithms import create, module_of

    values: dict[str, Any] = {}
    for path in paths:
        try:
            values |= tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise typer.BadParameter(f"cannot read {path}: {error}", param_hint="CONFIG.toml") from error
    values |= {name: value for name, value in flags.items() if value is not None}
    if settings:
        values["settings"] = {**values.get("settings", {}), **settings}
    if isinstance(values.get("settings", {}), dict) and "baseline" not in values:
        algorithm = str(values.get("algorithm", "fedavg"))
        create(algorithm, values.get("settings"), [module_of(algorithm)])
    return values


def _configuration(values: dict[str, Any]) -> SimulationConfig:
    from simulator.simulation import to_config

    if "model" not in values:
        raise typer.BadParameter("name a model, for instance --model mlp", param_hint="--model")
    try:
        return to_config(values)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error), param_hint="CONFIG.toml") from error
