"""`muster simulate`: the vectorised engine on a data set with users."""

from __future__ import annotations

import dataclasses
import functools
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from muster.options.simulate import configuration, with_simulation_settings
from muster.output import Json, emit, progress, remark, show_fields

SOURCE = "The model, as --model has it; or a file of options by name, and [settings], which flags override."
OUT = "A new folder that keeps the run: configuration, a line of metrics for each round, checkpoints, model, curve."
RESUME = (
    "The folder of a run that was ended, by whatever: go on from its last checkpoint, to the same bits. Needs no other "
    "option."
)
TENSORBOARD = "Write the run's figures for TensorBoard too, in the folder tensorboard of the run."
MLFLOW = "Log the run to MLflow too, where MLFLOW_TRACKING_URI says."

if TYPE_CHECKING:
    from rich.progress import Progress

    from simulator.configuration import SimulationConfig
    from simulator.runs.trackers import MLflow, TensorBoard
    from simulator.simulation import OnRound, SimulationResult
    from simulator.training import Point, Watch


@with_simulation_settings
def simulate(
    *,
    source: Annotated[str | None, typer.Argument(metavar="MODEL|CONFIG.toml", help=SOURCE)] = None,
    settings: dict[str, Any],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=OUT)] = None,
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
      muster simulate mlp --algorithm fedadam --rounds 20
      muster simulate mlp --algorithm fedadam --rounds 500 --out runs/a
      muster simulate --resume runs/a
    """
    where = _Where(out, resume, tensorboard, mlflow)
    where.check()
    files = [] if where.configuration is None else [where.configuration]
    if source is not None:
        if Path(source).suffix == ".toml" or Path(source).is_file():
            files.append(Path(source))
        elif "model" in settings:
            words = f"{source} is no file, and the model is {settings['model']} already; leave one of them out"
            raise typer.BadParameter(words, param_hint="MODEL|CONFIG.toml")
        else:
            settings = {**settings, "model": source}
    chosen = configuration(files, settings)
    try:
        result = _simulated(chosen, where)
    except KeyboardInterrupt:
        if where.folder is not None and (where.folder / "config.toml").is_file():
            remark(f"go on with --resume {where.folder}")
        raise
    return emit(result) if json else _show(result, where.folder)


def _show(result: SimulationResult, folder: Path | None) -> None:
    facts = dataclasses.asdict(result)
    del facts["curve"]
    facts |= facts.pop("figures")
    facts["privacy"] = result.privacy and msgspec.structs.asdict(result.privacy)
    for absent in [name for name in ("excluded", "epsilon", "privacy", "diverged") if not facts[name]]:
        del facts[absent]
    show_fields(facts)
    if folder is not None:
        remark(f"run: {folder}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Where:
    """Where a simulation is kept: in a new folder, in that of a run to resume, or in none; and what else is told."""

    out: Path | None
    resume: Path | None
    tensorboard: bool
    mlflow: bool

    @property
    def folder(self) -> Path | None:
        """The folder, if there is one."""
        return self.out or self.resume

    @property
    def configuration(self) -> Path | None:
        """The file with the configuration of the run to resume."""
        return self.resume and self.resume / "config.toml"

    def check(self) -> None:
        """Raise typer.BadParameter for what does not go together."""
        if self.out is not None and self.resume is not None:
            raise typer.BadParameter("start a run with --out or go on with one, not both", param_hint="--resume")
        if self.folder is None and (self.tensorboard or self.mlflow):
            raise typer.BadParameter(
                "only a run in a folder is logged: give --out DIR", param_hint="--tensorboard/--mlflow"
            )
        if self.configuration is not None and not self.configuration.is_file():
            raise typer.BadParameter(
                f"{self.resume} is not the folder of a run: it has no config.toml", param_hint="--resume"
            )


def _simulated(chosen: SimulationConfig, where: _Where) -> SimulationResult:
    """The simulation, in a folder or without; shows how far it is."""
    from muster.run_folders import resume, start
    from simulator.engines.memory import keep_freed_memory
    from simulator.simulation import simulate
    from simulator.training import Watch

    keep_freed_memory()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # what a user's own code and Ray print is not the result
        trackers = [stack.enter_context(closing(tracker)) for tracker in _trackers(where, chosen)]
        shown = _shown_in(stack.enter_context(progress()), chosen)
        ends = stack.enter_context(_interruptible()) if where.folder else lambda number, point: None
        watch = Watch()

        def on_round(number: int, point: Point) -> None:
            if watch.look(point):
                remark(f"warning: {watch.words}")
            for hear in (shown, *trackers, ends):
                hear(number, point)

        if where.out is not None:
            return start(where.out, chosen, on_round)
        if where.resume is not None:
            return resume(where.resume, chosen, on_round, functools.partial(_begin, where.resume, chosen, watch))
        return simulate(chosen, on_round)


def _begin(folder: Path, config: SimulationConfig, watch: Watch, rounds: int) -> None:
    """Say with which round a run goes on. rounds: those that the checkpoint holds, which the watch is told of."""
    from simulator.runs.reading import read_metrics

    for point in read_metrics(folder):
        watch.look(point)
    remark(f"goes on with round {rounds + 1} of {config.rounds}" if rounds else "no checkpoint: begins with round 1")


@contextmanager
def _interruptible() -> Iterator[OnRound]:
    """A block that Ctrl-C ends at the end of a round, and a second one, or one before any round has ended, at once.

    It gives what must hear of every round, after everything else.
    """
    begun = asked = False

    def ask(signum: int, frame: object) -> None:
        nonlocal asked
        if asked or not begun:
            raise KeyboardInterrupt
        asked = True
        remark("ends after this round; press Ctrl-C again to end at once")

    def on_round(number: int, point: Point) -> None:
        nonlocal begun
        begun = True
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield on_round
    finally:
        signal.signal(signal.SIGINT, before)


def _trackers(where: _Where, config: SimulationConfig) -> list[TensorBoard | MLflow]:
    """What else hears of every round."""
    from simulator.runs.reading import flat_of
    from simulator.runs.trackers import trackers

    if where.folder is None:
        return []
    again = f"go on with --resume={where.folder}"
    return trackers(where.folder, flat_of(config), again, tensorboard=where.tensorboard, mlflow=where.mlflow)


def _shown_in(bar: Progress, config: SimulationConfig) -> OnRound:
    """What shows every round in a bar."""
    from simulator.training import noting

    task = bar.add_task(f"{config.model} · {config.baseline or config.algorithm}", total=config.rounds, note="")
    note = noting()

    def on_round(number: int, point: Point) -> None:
        bar.update(task, completed=number, note=note(point))

    return on_round
