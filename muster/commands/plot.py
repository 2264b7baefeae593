"""`muster plot`: the curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.output import remark

if TYPE_CHECKING:
    from simulator.runs.reading import Run

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
    from fedcore.names import offered
    from muster.pictures.curves import Axes, draw_repeated
    from muster.pictures.picture import FORMATS
    from simulator.errors import RunError
    from simulator.runs.grouping import grouped
    from simulator.runs.reading import AXES, read_run
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
