"""Simulations and sweeps from Python, in memory or in folders, and pictures of their curves."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
import torch

from coordinator.rules.progress import START
from export.model import Model, ModelSpec
from fedcore.algorithms import name_of, setting_meant
from fedcore.algorithms.algorithm import Algorithm
from fedcore.errors import table_of
from fedcore.params import Float32
from fedcore.private_files import write_whole
from fedcore.validation import offered
from muster.pictures import Axes, Picture, draw_measured, draw_repeated
from muster.python.arguments import check_trained, of_kind, progress_line, speaking_python, with_settings_of
from simulator import datasets
from simulator.configuration import SimulationConfig, to_config, without_numpy
from simulator.engines.memory import one_thread
from simulator.engines.processes import usable_cores
from simulator.errors import EngineError
from simulator.planned import completed_by_plan
from simulator.population import Population
from simulator.runs.reading import grouped, read_run, read_tensors
from simulator.runs.running import resume_run, start_run, writing
from simulator.runs.sweeping import RUNS, SEED, SweepFile, SweepOutcome, SweepRun, means_over_seeds, run_sweep, runs_of
from simulator.simulation import OnRound, Overrides, SimulationResult, advance, model_of, training_of
from simulator.training import ACCURACY, Point, Tensors, noting

if TYPE_CHECKING:
    import pandas as pd

    from muster.python.operating import Task


# Starts and resumes simulations in folders, each with a picture of its learning curve.


PICTURE = "learning-curve.svg"


def start(path: Path, config: SimulationConfig, on_round: OnRound) -> SimulationResult:
    """Run a simulation in a new folder. Raises as `start_run`."""
    return _drawn(path, start_run(path, config, on_round))


def resume(
    path: Path, config: SimulationConfig, on_round: OnRound, on_start: Callable[[int], None]
) -> SimulationResult:
    """Resume the run in a folder. on_start: is told how many rounds are done. Raises as `resume_run`."""
    return _drawn(path, resume_run(path, config, on_round, on_start=on_start))


def _drawn(path: Path, result: SimulationResult) -> SimulationResult:
    name = f"{result.model}, {result.baseline or result.algorithm}"
    title = f"{result.model} on {Path(result.dataset).name}"
    with writing(path):
        draw_measured({name: read_run(path).points}, title).save(path / PICTURE)
    return result


# Simulations and sweeps from Python, in memory or in folders, and pictures of their curves.


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


PARAMS = "server.params"
DEFAULT_ALGORITHM = "fedavg"
CALLED = {"dataset": "users"}
"""Arguments that have another name here than in the file of a run."""
NAMES_ALONE = (
    "a run in a folder is loaded again when it is resumed, so it takes names alone: give model, users and algorithm as "
    "package.module:function (docs/simulation.md), or leave `out` out"
)


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A simulation that is done.

    points: figures of every round, such as `train.loss`; those at which held-out users measured have `test.accuracy`,
    `test.loss` and percentiles over users too, and `result.curve` has these alone. params: the model, flat (D,); with
    the baseline `local` that of every user (users, D); None with a linear baseline. folder: where the run is kept, if
    anywhere. config: what it was made of, with the names of objects.
    """

    result: SimulationResult
    points: list[Point]
    params: Float32 | None
    folder: Path | None
    config: SimulationConfig
    _tensors: Tensors
    _untrained: Callable[[], Model]

    def __repr__(self) -> str:
        return f"Run({self.result.words})"

    def _repr_html_(self) -> str:
        return self.result._repr_html_()

    @property
    def curve(self) -> pd.DataFrame:
        """The points at which held-out users measured, as a table with their rounds as index.

        Raises ModuleNotFoundError without pandas.
        """
        # The figure that only round 1 has would be a column of NaN.
        curve = frame_of(self.result.curve, "run.curve", "run.result.curve")
        return curve.drop(columns=START, errors="ignore").set_index("round")

    @property
    def accuracy(self) -> float | None:
        """The accuracy per example of all held-out users at the end; None where the model has no such metric."""
        return self.result.test_accuracy

    def tensors(self) -> Tensors:
        """The model as named tensors. Raises EngineError with a baseline that trains another kind of model, or many."""
        if not self._tensors:
            each = (
                "a model for each user: take `run.params`" if self.params is not None else "a linear model, not torch's"
            )
            raise EngineError(f"the baseline {self.result.baseline} has no tensors, as it trains {each}")
        return self._tensors

    @property
    def spec(self) -> ModelSpec:
        """The model as `muster.export` takes it, sized for the users, before training."""
        return self._untrained().spec

    def model(self) -> torch.nn.Module:
        """The trained model as a torch module in eval mode, built by its spec. Raises as `tensors`."""
        tensors, model = self.tensors(), self._untrained()
        return model.trained(model.schema.flatten(tensors)).module

    def save(self, path: Path | str) -> None:
        """Write the tensors in safetensors' format, as a run in a folder has them. Raises as `tensors`, and NotWritten.

        `start` of `muster.simulate` reads such a file.
        """
        write_whole(Path(path), safetensors.numpy.save(self.tensors()))

    def plot(self, metric: str = ACCURACY) -> Picture:
        """A figure over rounds, as `muster.plot` draws it."""

        return plot(self, metric)


@speaking_python
@with_settings_of(SimulationConfig, but=("model", "dataset", "algorithm", "settings"))
def simulate(
    model: str | ModelSpec,
    users: str | Population = "digits",
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
    *,
    settings: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    on_round: OnRound = lambda number, point: None,
    **options: Any,
) -> Run:
    """Train over simulated users, and measure on users that nobody trains on.

    model, users, algorithm: names, as `muster simulate` takes them, or objects. settings: of an algorithm that is
    named. out: a new folder that keeps the run, which survives a kill (`simulator.resume_run`); it can be made of names
    alone. on_round: called after every round with its number and its point. With `plan`, `algorithm` is the plan's, and
    only one's own is named. A part, such as `privacy`, is an object or a mapping.

    Raises TypeError for an unknown keyword, and SimulatorError, ExportError, AlgorithmError or CompressionError, naming
    what is wrong. The other keywords are the settings of a simulation:
    """
    of_kind("on_round", on_round, (Callable,), "a function of a round's number and its point")
    values, given = arguments_of(model, users, algorithm, settings, options)
    config = to_config(values)
    if out is not None and given != Overrides():
        raise EngineError(NAMES_ALONE)
    with progress_line() as tell:
        note = noting()

        def heard(number: int, point: Point) -> None:
            tell(f"{config.model}, {config.baseline or config.algorithm}: round {number}, {note(point)}")
            on_round(number, point)

        if out is None:
            return _in_memory(given.named(config), given, heard)

        return kept_in(Path(out), given, start(Path(out), config, heard))


def arguments_of(
    model: str | ModelSpec,
    users: str | Population,
    algorithm: str | Algorithm,
    settings: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], Overrides]:
    """The arguments of a simulation as plain values, completed by those of a plan, and the objects among them."""
    check_keywords(options, algorithm)
    check_trained(model, algorithm, settings)
    of_kind("users", users, (str, Population), "a data set's name, or a Population: Population.of(names, shards)")
    given = Overrides(
        users=None if isinstance(users, str) else users,
        model=None if isinstance(model, str) else model,
        algorithm=None if isinstance(algorithm, str) else algorithm,
    )
    named: dict[str, Any] = {
        "model": model if isinstance(model, str) else model.name,
        "dataset": users if isinstance(users, str) else "own users",
        "algorithm": algorithm if isinstance(algorithm, str) else algorithm.name,
        "settings": dict(settings or {}),
    }
    return _completed({**named, **options}, given), given


def kept_in(folder: Path, given: Overrides, result: SimulationResult) -> Run:
    """The run in a folder, which is done. given: what its configuration does not name."""
    run = read_run(folder)
    untrained = partial(model_of, run.config, given)
    return Run(result, list(run.points), _params(run.vectors()), folder, run.config, read_tensors(folder), untrained)


load = speaking_python(datasets.load)


def frame_of(rows: Sequence[Mapping[str, Any]], name: str, other: str) -> pd.DataFrame:
    """Rows as a table of pandas. name, other: what it is, and where the rows are without pandas."""
    try:
        import pandas as pd  # nothing else needs it
    except ModuleNotFoundError as error:
        words = f"`{name}` is a table of pandas: pip install pandas, or take `{other}`, a list"
        raise ModuleNotFoundError(words, name="pandas") from error
    return pd.DataFrame(rows)


def check_keywords(options: Mapping[str, Any], algorithm: str | Algorithm, *, grid: bool = False) -> None:
    """Raise TypeError for a setting of an algorithm that is given as an option, saying where it belongs.

    grid: whether these are lists of values of a sweep, which names other mistakes itself. Otherwise also for a name
    that is no option.
    """
    keywords = list(inspect.signature(simulate).parameters)
    for name in options:
        if name not in keywords:
            found = setting_meant(name, algorithm if isinstance(algorithm, str) else name_of(algorithm))
            if found is not None and name not in CALLED:
                own = f"{{{found[0]!r}: {options[name]!r}}}"
                setting = f"grid={{'settings': {own}}}" if grid else f"settings={own}"
                raise TypeError(
                    f"{'sweep' if grid else 'simulate'}(): {found[0]} is a setting of {found[1]}: {setting}"
                )
            if not grid:
                raise TypeError(f"simulate() has no option {name!r}; {offered(CALLED.get(name, name), keywords)}")


def _completed(values: dict[str, Any], given: Overrides) -> dict[str, Any]:
    """Options, completed by those of the plan where there is one."""
    if "plan" not in values:
        return values
    if given.algorithm is not None:
        raise EngineError("a plan has its own algorithm: leave `algorithm` out")
    if values["algorithm"] == DEFAULT_ALGORITHM:
        del values["algorithm"]
    return completed_by_plan(values)


def _in_memory(config: SimulationConfig, given: Overrides, on_round: OnRound) -> Run:
    training, points = training_of(config, given=given), list[Point]()
    result = advance(config, training, points, on_round)
    params, untrained = _params(training.vectors()), partial(model_of, config, given)
    made_of = replace(config, settings=result.settings)
    return Run(result, points, params, None, made_of, training.tensors(), untrained)


def _params(vectors: Mapping[str, Any]) -> Float32 | None:
    """The model among the vectors of a training; None with a linear baseline."""
    return np.asarray(vectors[PARAMS], np.float32) if PARAMS in vectors else None


@dataclass(frozen=True, slots=True, repr=False)
class Sweep:
    """Simulations that are done, or failed.

    outcomes: of all, in order, with the reason of each that has no result. runs: those that are done, by the names of
    their folders.
    """

    outcomes: list[SweepOutcome]
    runs: dict[str, Run]

    def __repr__(self) -> str:
        lost = [outcome for outcome in self.outcomes if outcome.result is None]
        first = f", {len(lost)} without a result, first {lost[0].run.name}: {lost[0].why}" if lost else ""
        return f"Sweep({len(self.outcomes)} runs of {len(self.means)} combinations{first})"

    def _repr_html_(self) -> str:
        return table_of(list(self.means[0]), [list(row.values()) for row in self.means])

    @property
    def means(self) -> list[dict[str, Any]]:
        """A row for each combination: its mean figures over seeds."""
        return means_over_seeds(self.outcomes)

    @property
    def table(self) -> pd.DataFrame:
        """The same as a table. Raises ModuleNotFoundError without pandas."""
        return frame_of(self.means, "sweep.table", "sweep.means")

    def plot(self, metric: str = ACCURACY) -> Picture:
        """A figure over rounds, as `muster.plot` draws it."""

        return plot(self, metric)


@speaking_python
def sweep(  # noqa: PLR0913  # what runs, what varies, and where it is kept
    model: str | ModelSpec,
    users: str | Population = "digits",
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
    *,
    grid: Mapping[str, Any],
    seeds: int = 1,
    settings: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    processes: int | None = None,
    **options: Any,
) -> Sweep:
    """Run `simulate` with every combination of values, and every seed, each in a process of its own.

    grid: lists of values by keyword, and of settings of the algorithm: {"cohort": [5, 10], "settings": {"client_lr":
    [0.1, 0.3]}}. seeds: how many, from `seed` on. out: a folder that keeps the runs, which can be of names alone; the
    same call goes on with a sweep that was ended. processes: how many run at a time, by default one for each core. The
    other arguments are those of `simulate`. A run that fails keeps no other from running.

    Raises as `simulate`, and RunError naming the run and its option, before any run.
    """
    of_kind("grid", grid, (Mapping,), 'lists of values by keyword, such as {"cohort": [5, 10]}')
    for name, most in (("seeds", seeds), ("processes", 1 if processes is None else processes)):
        of_kind(name, most, (int,), "a whole number from 1")
        if most < 1:
            raise EngineError(f"{name} must be a whole number from 1, not {most}")
    values, given = arguments_of(model, users, algorithm, settings, options)
    check_keywords(grid, algorithm, grid=True)
    named = {here: there for there, here in CALLED.items()}
    varied = {named.get(name, name): _values(each) for name, each in grid.items()}
    _check_objects(varied, given)
    if out is not None and given != Overrides():
        raise EngineError(NAMES_ALONE)
    first = values.get(SEED, 0)
    several = {SEED: list(range(first, first + seeds))} if seeds > 1 and SEED not in varied else {}
    runs = runs_of(SweepFile(options=values, grid=varied | several), given)
    if out is not None:
        return _swept(runs, Path(out), processes)
    with tempfile.TemporaryDirectory(prefix="muster-sweep-") as folder:
        made = _swept(runs, Path(folder), processes)
    return replace(made, runs={name: replace(run, folder=None) for name, run in made.runs.items()})


def _values(given: Any) -> Any:
    """The values of a keyword as a list, of a mapping those of each key; what is neither as it is."""
    if isinstance(given, Mapping):
        return {name: _values(each) for name, each in given.items()}
    several = isinstance(given, Iterable) and not isinstance(given, str)
    return [without_numpy(value) for value in given] if several else given


def _check_objects(varied: Mapping[str, Any], given: Overrides) -> None:
    """Raise EngineError for a grid over what was given as an object."""
    fixed = {"model": given.model, "dataset": given.users, "algorithm": given.algorithm, "settings": given.algorithm}
    for name in varied:
        if fixed.get(name.partition(".")[0]) is not None:
            raise EngineError(f"{CALLED.get(name, name)} cannot vary where it was given as an object: give its name")


@one_thread()
def _swept(runs: Sequence[SweepRun], folder: Path, processes: int | None) -> Sweep:
    ended = 0
    with progress_line() as tell:

        def on_end(outcome: SweepOutcome) -> None:
            nonlocal ended
            ended += 1
            tell(f"{ended} of {len(runs)} runs, {outcome.run.name} {outcome.status}")

        outcomes = run_sweep(runs, folder, processes or usable_cores(), on_end)
    done = [(outcome.run, outcome.result) for outcome in outcomes if outcome.result is not None]
    kept = {run.name: kept_in(folder / RUNS / run.name, run.given, result) for run, result in done}
    return Sweep(outcomes, kept)
