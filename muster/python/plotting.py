"""Pictures of runs from Python: the curves of one or several, or of a sweep with its seeds as bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedcore.names import offered
from muster.pictures.curves import Axes, draw_repeated
from muster.python.simulating import Run
from muster.python.sweeping import Sweep
from simulator.course import ACCURACY
from simulator.errors import EngineError

if TYPE_CHECKING:
    from muster.pictures.picture import Picture
    from muster.python.operating import Task

Series = dict[int, float]


def plot(runs: Run | Task | Sweep | Sequence[Run] | Mapping[str, Run | Task], metric: str = ACCURACY) -> Picture:
    """A figure of runs over rounds, such as `train.loss`, which a notebook shows; `save(path)` writes a .svg or .png.

    runs: one, several, or several by the names that they have in the picture, which are by default what they differ in;
    or tasks of a coordinator. Of a sweep, each combination is a curve: the mean over seeds, in a band from the lowest
    to the highest. Raises EngineError where there is no run, or none has the figure.
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
    if isinstance(runs, Run):
        return {f"{runs.result.model}, {runs.result.baseline or runs.result.algorithm}": [runs]}
    if isinstance(runs, Mapping):
        return {name: [run] for name, run in runs.items()}
    if isinstance(runs, Sequence):
        return {name: [run] for name, run in zip(_differences(runs), runs, strict=True)}
    if not isinstance(runs, Sweep):
        return {runs.name: [runs]}
    groups: dict[str, list[Run]] = {}
    for name, run in runs.named:
        groups.setdefault(name, []).append(run)
    return groups


def _differences(runs: Sequence[Run]) -> list[str]:
    """A name for each run: the settings in which they differ, and its place where another has the same."""
    facts: list[dict[str, Any]] = [
        {name: getattr(run.result, name) for name in ("model", "dataset", "baseline", "algorithm", "cohort", "seed")}
        | run.result.settings
        for run in runs
    ]
    every = dict.fromkeys(name for one in facts for name in one)
    varied = [name for name in every if len({repr(one.get(name)) for one in facts}) > 1] or ["model", "algorithm"]
    bare = {"model", "dataset", "baseline", "algorithm"}
    words = [
        ", ".join(
            str(one[name]) if name in bare else f"{name}={one[name]}" for name in varied if one.get(name) is not None
        )
        for one in facts
    ]
    return [word if words.count(word) == 1 else f"{word} ({place})" for place, word in enumerate(words, 1)]
