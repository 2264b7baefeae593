"""`muster sweep`: simulations on all cores that differ in some options; `muster plot`: their curves."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from muster.output import Json, emit, loading, progress, remark, show_table
from muster.plain import words

if TYPE_CHECKING:
    from simulator.runs.reading import Run
    from simulator.runs.sweeping import SweepOutcome, SweepRun


OUT = "The folder of the runs, the tables and the heat map. The same command goes on with a sweep that was ended."
HEAT_MAP = "The two options on the edges of the heat map, by comma; by default the first two of the grid but the seed."
PROCESSES = "Runs at a time, each in a process of its own.  [default: one for each core]"


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="[options], [grid] and [random].")],
    out: Annotated[Path, typer.Option(help=OUT)] = Path("sweep"),
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

        from simulator.engines.workers.processes import usable_cores
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
    from muster.pictures.curves import write_svg_and_png
    from muster.pictures.grids import draw_heat_map
    from muster.tables import latex, plain_markdown

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
    from muster.pictures.curves import FORMATS, Axes, draw_repeated
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
