"""Pictures of runs from Python: the curves of one or several, or of a sweep with its seeds as bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedcore.names import offered
from muster.pictures.curves import Axes, draw_repeated
from muster.python.simulating import Run
from muster.python.sweeping import Sweep
from simulator.course import ACCURACY
from simulator.errors import EngineError
from simulator.runs.grouping import grouped

if TYPE_CHECKING:
    from muster.pictures.picture import Picture
    from muster.python.operating import Task

Series = dict[int, float]


def plot(runs: Run | Task | Sweep | Sequence[Run] | Mapping[str, Run | Task], metric: str = ACCURACY) -> Picture:
    """A figure of runs over rounds, such as `train.loss`, which a notebook shows; `save(path)` writes a .svg or .png.

    runs: one, several, a sweep, or several by the names that they have in the picture; or tasks of a coordinator. By
    default curves are named for the settings that differ, and runs that differ only in the seed are one: their mean, in
    a band from the lowest to the highest. Raises EngineError where there is no run, or none has the figure.
    """
    courses = {name: [run.points for run in group] for name, group in _groups(runs).items()}
    series = {
        name: [one for one in (_series(points, metric) for points in each) if one] for name, each in courses.items()
    }
    if not any(series.values()):
        names = {name for each in courses.values() for points in each for point in points for name in point} - {"round"}
        raise EngineError(
            f"no run has a figure {metric!r}; {offered(metric, sorted(names)) if names else 'there is none'}"
        )
    drawn = {name: [list(one.items()) for one in group] for name, group in series.items() if group}
    return draw_repeated(drawn, Axes(x="rounds", y=metric))


def _series(points: Sequence[Mapping[str, float]], metric: str) -> Series:
    return {int(point["round"]): point[metric] for point in points if metric in point}


def _groups(
    runs: Run | Task | Sweep | Sequence[Run] | Mapping[str, Run | Task],
) -> Mapping[str, Sequence[Run | Task]]:
    """Runs by the names of their curves."""
    if isinstance(runs, Mapping):
        return {name: [run] for name, run in runs.items()}
    if isinstance(runs, Sweep):
        runs = list(runs.runs.values())
    elif isinstance(runs, Run):
        runs = [runs]
    elif not isinstance(runs, Sequence):
        return {runs.name: [runs]}
    return grouped(runs, [f"run {number}" for number in range(1, len(runs) + 1)])
