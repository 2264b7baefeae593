"""Simulations from Python: with names or objects, in memory or in a folder, and their runs as tables and pictures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
import torch

from coordinator.rules.divergence import START
from export.model import Model, ModelSpec
from fedcore.algorithms import name_of, setting_meant
from fedcore.algorithms.algorithm import Algorithm
from fedcore.names import offered
from fedcore.params import Float32
from fedcore.private_files import write_whole
from muster.python.arguments import check_trained, of_kind, speaking_python, with_settings_of
from muster.python.progress import progress_line
from simulator import datasets
from simulator.configuration import SimulationConfig, to_config
from simulator.course import ACCURACY, Point, noting
from simulator.errors import EngineError
from simulator.planned import completed_by_plan
from simulator.population import Population
from simulator.runs.reading import read_run, read_tensors
from simulator.simulation import OnRound, Overrides, SimulationResult, advance, model_of, training_of
from simulator.training import Tensors

if TYPE_CHECKING:
    import pandas as pd

    from muster.pictures.picture import Picture

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
        from muster.python.plotting import plot  # half as long to load as all the rest

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
        from muster.run_folders import start  # draws

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
