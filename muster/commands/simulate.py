"""`muster simulate`: the vectorised engine on a data set with users."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack, closing, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from muster.options.simulate import configuration, with_simulation_settings
from muster.output import Json, emit, progress, remark, show_fields

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
    from simulator.course import Point
    from simulator.runs.trackers import MLflow, TensorBoard
    from simulator.simulation import OnRound, SimulationResult


@with_simulation_settings
def simulate(
    *,
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Options by name, and [settings]; flags override.")
    ] = None,
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
      muster simulate --model mlp --algorithm fedadam --rounds 20
      muster simulate --model mlp --algorithm fedadam --rounds 500 --out runs/a
      muster simulate --resume runs/a
    """
    where = _Where(out, resume, tensorboard, mlflow)
    where.check()
    chosen = configuration([path for path in (where.configuration, config) if path], settings)
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
    for absent in [name for name in ("excluded", "epsilon", "privacy") if not facts[name]]:
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

    keep_freed_memory()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # what a user's own code and Ray print is not the result
        trackers = [stack.enter_context(closing(tracker)) for tracker in _trackers(where, chosen)]
        shown = _shown_in(stack.enter_context(progress()), chosen)

        def on_round(number: int, point: Point) -> None:
            for hear in (shown, *trackers):
                hear(number, point)

        if where.out is not None:
            return start(where.out, chosen, on_round)
        if where.resume is not None:
            return resume(where.resume, chosen, on_round)
        return simulate(chosen, on_round)


def _trackers(where: _Where, config: SimulationConfig) -> list[TensorBoard | MLflow]:
    """What else hears of every round."""
    from simulator.runs.trackers import MLflow, TensorBoard

    folder = where.folder
    if folder is None:
        return []
    asked = (where.tensorboard, lambda: TensorBoard(folder)), (where.mlflow, lambda: MLflow(folder, config))
    return [make() for wanted, make in asked if wanted]


def _shown_in(bar: Progress, config: SimulationConfig) -> OnRound:
    """What shows every round in a bar."""
    from simulator.course import noting

    task = bar.add_task(f"{config.model} · {config.baseline or config.algorithm}", total=config.rounds, note="")
    note = noting()

    def on_round(number: int, point: Point) -> None:
        bar.update(task, completed=number, note=note(point))

    return on_round
