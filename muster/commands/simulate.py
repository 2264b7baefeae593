"""`muster simulate`: one simulation; `muster sweep`: many that differ in some options; `muster plot`: their curves."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from muster.options import configuration, with_simulation_settings
from muster.output import (
    Json,
    emit,
    latex,
    loading,
    plain_markdown,
    progress,
    remark,
    say_next,
    show_fields,
    show_table,
)
from muster.plain import words

if TYPE_CHECKING:
    from rich.progress import Progress

    from simulator.configuration import SimulationConfig
    from simulator.runs.reading import Run
    from simulator.runs.sweeping import SweepOutcome, SweepRun
    from simulator.runs.trackers import MLflow, TensorBoard
    from simulator.simulation import OnRound, SimulationResult
    from simulator.training import Point, Watch


SOURCE = "The model, as --model has it; or a file of options by name, and [settings], which flags override."
RUN = "A new folder that keeps the run: configuration, a line of metrics for each round, checkpoints, model, curve."
RESUME = (
    "The folder of a run that was ended, by whatever: go on from its last checkpoint, to the same bits. Needs no other "
    "option."
)
TENSORBOARD = "Write the run's figures for TensorBoard too, in the folder tensorboard of the run."
MLFLOW = "Log the run to MLflow too, where MLFLOW_TRACKING_URI says."


@with_simulation_settings
def simulate(
    *,
    source: Annotated[str | None, typer.Argument(metavar="MODEL|CONFIG.toml", help=SOURCE)] = None,
    settings: dict[str, Any],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=RUN)] = None,
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
    facts["class_names"] = ", ".join(f"{number} {name}" for number, name in enumerate(result.class_names))
    facts["privacy"] = result.privacy and msgspec.structs.asdict(result.privacy)
    rare = ("excluded", "epsilon", "privacy", "diverged", "class_names", "dropped", "standardised")
    show_fields({name: value for name, value in facts.items() if value or name not in rare})
    if folder is not None:
        remark(f"run: {folder}")
        if result.standardised:
            say_next("make its plan for devices", ["muster", "export", "--run", folder])


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
    from muster.python.simulating import resume, start
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


# `muster sweep`: simulations on all cores that differ in some options; `muster plot`: their curves.


RUNS = "The folder of the runs, the tables and the heat map. The same command goes on with a sweep that was ended."
HEAT_MAP = "The two options on the edges of the heat map, by comma; by default the first two of the grid but the seed."
PROCESSES = "Runs at a time, each in a process of its own.  [default: one for each core]"


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="[options], [grid] and [random].")],
    out: Annotated[Path, typer.Option(help=RUNS)] = Path("sweep"),
    processes: Annotated[int | None, typer.Option(min=1, help=PROCESSES)] = None,
    heat_map: Annotated[str | None, typer.Option(metavar="ROWS,COLUMNS", help=HEAT_MAP)] = None,
    json: Json = False,
) -> None:
    """Run many simulations that differ in some options.

    The file has the options that all share, as `muster simulate` takes them, and those that vary:

    \b
      [options]
      model = "mlp"
      [grid]  # every combination
      algorithm = ["fedavg", "fedadam"]
      seed = [0, 1, 2]
      settings.client_lr = [0.1, 0.3]

    It prints means over seeds, and writes them as table.md and table.tex, all runs as table.csv and table.json, and
    heat maps. Exit code 1 says that a run failed.
    """
    with loading():
        import torch

        from simulator.engines.processes import usable_cores
        from simulator.runs.sweeping import means_over_seeds, read_sweep, run_sweep

    torch.set_num_threads(1)
    runs = read_sweep(file)
    edges = _edges(heat_map, runs)
    with progress() as bar:
        task = bar.add_task(f"{file.stem}, {len(runs)} runs", total=len(runs), note="")

        def on_end(outcome: SweepOutcome) -> None:
            bar.update(task, advance=1, note=f"{outcome.run.name} {outcome.status}")

        outcomes = run_sweep(runs, out, processes or usable_cores(), on_end)
    lost = [outcome for outcome in outcomes if outcome.status != "done"]
    for outcome in lost:
        remark(f"{outcome.run.name} {outcome.status}: {outcome.why}")
    means = means_over_seeds(outcomes)
    _write(out, [outcome.row for outcome in outcomes], means, edges)
    if json:
        emit({"runs": [outcome.row for outcome in outcomes], "means": means})
    else:
        show_table(list(means[0]), [list(row.values()) for row in means])
        remark(f"tables and runs: {out}")
    if any(outcome.status == "failed" for outcome in lost):
        raise typer.Exit(1)


def _edges(asked: str | None, runs: Sequence[SweepRun]) -> list[str]:
    """The options on the edges of the heat map: the two that were asked for, or the first two; fewer are no map."""
    from fedcore.validation import offered
    from simulator.runs.sweeping import SEED

    varied = [name for name in runs[0].varied if len({str(run.varied[name]) for run in runs}) > 1]
    if asked is None:
        return [name for name in varied if name != SEED][:2]
    edges = asked.split(",")
    for name in edges:
        if name not in varied:
            raise typer.BadParameter(f"no option {name!r} varies; {offered(name, varied)}", param_hint="--heat-map")
    if len(set(edges)) != 2:
        raise typer.BadParameter(f"name two options, not {asked!r}", param_hint="--heat-map")
    return edges


def _write(out: Path, rows: Sequence[dict[str, Any]], means: Sequence[dict[str, Any]], edges: Sequence[str]) -> None:
    """Write the tables, and the heat map where two options vary."""
    from fedcore.private_files import write_whole
    from muster.pictures import draw_heat_map, write_svg_and_png

    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]))
    table.writeheader()
    table.writerows(rows)
    write_whole(out / "table.csv", text.getvalue().encode())
    columns, cells = list(means[0]), [list(map(words, row.values())) for row in means]
    write_whole(out / "table.md", plain_markdown(columns, cells).encode())
    write_whole(out / "table.tex", latex(columns, cells).encode())
    write_whole(out / "table.json", msgspec.json.format(msgspec.json.encode({"runs": rows, "means": means})))
    if len(edges) == 2:
        high, wide = (list(dict.fromkeys(row[edge] for row in rows)) for edge in edges)
        figure = "test_accuracy" if any(row["test_accuracy"] is not None for row in rows) else "test_loss"
        values = [
            [_mean(figure, [row for row in rows if (row[edges[0]], row[edges[1]]) == (y, x)]) for x in wide]
            for y in high
        ]
        labels = [[str(value) for value in side] for side in (high, wide)]
        title = f"{figure.removeprefix('test_')}, unseen users"
        heat_map = draw_heat_map(title, (edges[0], labels[0]), (edges[1], labels[1]), values)
        write_svg_and_png({out / "heat-map.svg": heat_map})


def _mean(figure: str, rows: Sequence[dict[str, Any]]) -> float | None:
    """The mean of a figure of rows; None without a result."""
    import statistics

    values = [row[figure] for row in rows if row[figure] is not None]
    return statistics.fmean(values) if values else None


X = "The x axis: rounds, examples (total of the clients that trained), or seconds."
Y = "The y axis: a figure of the runs, such as test.accuracy, test.loss, test.user_p5 or train.loss."


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of sweeps for all their runs.")
    ],
    x: Annotated[str, typer.Option(help=X)] = "rounds",
    y: Annotated[str, typer.Option(help=Y)] = "test.accuracy",
    out: Annotated[Path, typer.Option(help="The picture: .svg or .png.")] = Path("curves.svg"),
) -> None:
    """Draw the curves of runs, one for all seeds.

    Runs that differ only in the seed are one curve: their mean, as far as all of them got, in a band from the lowest to
    the highest. The legend names the settings that differ. Unfinished runs are drawn as far as they got; those without
    the figure are left out. For example:

      muster plot runs/fedavg runs/fedadam --x seconds --out curves.png
    """
    from fedcore.validation import offered
    from muster.pictures import FORMATS, Axes, draw_repeated
    from simulator.errors import RunError
    from simulator.runs.reading import AXES, grouped, read_run
    from simulator.runs.sweeping import RUNS

    if x not in AXES:
        raise typer.BadParameter(f"there is no axis {x!r}; {offered(x, AXES)}", param_hint="--x")
    if out.suffix not in FORMATS or not out.parent.is_dir():
        message = f"{out} must end in {' or '.join(FORMATS)} and lie in a folder that exists"
        raise typer.BadParameter(message, param_hint="--out")
    paths = [path for folder in runs for path in (sorted((folder / RUNS).glob("*")) or [folder])]
    drawn, errors = [], []
    for run in map(read_run, paths):
        try:
            run.series(x, y)
            drawn.append(run)
        except RunError as error:
            errors.append(error)
    if not drawn:
        raise errors[0]
    curves = {
        label: [list(zip(*run.series(x, y), strict=True)) for run in group]
        for label, group in grouped(drawn, _places(drawn)).items()
    }
    draw_repeated(curves, Axes(x=x, y=y, title=_title(drawn, {*map(len, curves.values())}))).save(out)
    for line in [*(f"left out: {error}" for error in errors), f"curves: {out}"]:
        remark(line)


def _title(runs: Sequence[Run], seeds: Collection[int]) -> str:
    """What all runs share, and what a band is. seeds: how many runs each of the curves has."""
    models, data = {run.config.model for run in runs}, {Path(run.config.dataset).name for run in runs}
    title = " on ".join(one.pop() for one in (models, data) if len(one) == 1)
    if max(seeds) == 1:
        return title
    count = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
    return f"{title}, mean and range of {count} seeds".removeprefix(", ")


def _places(runs: Sequence[Run]) -> list[str]:
    """The folders of runs, by their names alone where these differ."""
    names = [run.path.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]
