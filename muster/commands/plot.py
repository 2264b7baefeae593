"""`muster plot`: the curves of several runs in one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster.output import remark

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
    """Draw the curves of runs, with their folders as legend.

    Unfinished runs are drawn as far as they got; those without the figure are left out. For example:

      muster plot runs/fedavg runs/fedadam --x seconds --out curves.png
    """
    from fedcore.names import offered
    from muster.pictures.curves import Axes, draw_curves
    from muster.pictures.picture import FORMATS
    from simulator.errors import RunError
    from simulator.runs.reading import AXES, read_run
    from simulator.runs.sweeping import RUNS

    if x not in AXES:
        raise typer.BadParameter(f"there is no axis {x!r}; {offered(x, AXES)}", param_hint="--x")
    if out.suffix not in FORMATS or not out.parent.is_dir():
        message = f"{out} must end in {' or '.join(FORMATS)} and lie in a folder that exists"
        raise typer.BadParameter(message, param_hint="--out")
    paths = [path for folder in runs for path in (sorted((folder / RUNS).glob("*")) or [folder])]
    ambiguous = len({path.name for path in paths}) < len(paths)
    curves, errors = {}, []
    for run in map(read_run, paths):
        try:
            curves[str(run.path) if ambiguous else run.path.name] = list(zip(*run.series(x, y), strict=True))
        except RunError as error:
            errors.append(error)
    if not curves:
        raise errors[0]
    draw_curves(curves, Axes(x=x, y=y)).save(out)
    for line in [*(f"left out: {error}" for error in errors), f"curves: {out}"]:
        remark(line)
