"""Simulations from Python: with names or objects, in memory or in a folder, and their runs as tables and pictures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
import torch

from export.model import Model, ModelSpec
from fedcore.algorithms.algorithm import Algorithm
from fedcore.names import offered
from fedcore.params import Float32
from fedcore.private_files import write_whole
from muster.python.arguments import check_trained, of_kind, speaking_python, with_settings_of
from simulator import datasets
from simulator.configuration import SimulationConfig, to_config
from simulator.course import ACCURACY, Point
from simulator.errors import EngineError, RunError
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


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A simulation that is done.

    points: figures of every round, such as `train.loss`; those at which held-out users measured have `test.accuracy`,
    `test.loss` and percentiles over users too, and `result.curve` has these alone. params: the model, flat (D,); with
    the baseline `local` that of every user (users, D); None with a linear baseline. folder: where the run is kept, if
    anywhere.
    """

    result: SimulationResult
    points: list[Point]
    params: Float32 | None
    folder: Path | None
    _tensors: Tensors
    _untrained: Callable[[], Model]

    def __repr__(self) -> str:
        result = self.result
        reached = f"loss {result.test_loss:.3f}" if self.accuracy is None else f"accuracy {self.accuracy:.3f}"
        return f"Run({result.model}, {result.algorithm}, {result.rounds} rounds, {reached} of held-out users)"

    @property
    def curve(self) -> pd.DataFrame:
        """The points at which held-out users measured, as a table with their rounds as index.

        Raises ModuleNotFoundError without pandas.
        """
        try:
            import pandas as pd  # nothing else needs it
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "`run.curve` is a table of pandas: pip install pandas, or take `run.result.curve`, a list",
                name="pandas",
            ) from error
        return pd.DataFrame(self.result.curve).set_index("round")

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

    def plot(self, y: str = ACCURACY, out: Path | str | None = None) -> Picture:
        """A figure over rounds, which a notebook shows; written to `out` too, a .svg or a .png.

        Raises EngineError for a figure that no point has, NotWritten, and ModuleNotFoundError for a .png without resvg.
        """
        from muster.pictures.curves import Axes, draw_curves  # half as long to load as all the rest

        measured = [(point["round"], point[y]) for point in self.points if y in point]
        if not measured:
            names = sorted({name for point in self.points for name in point} - {"round"})
            raise EngineError(f"no point of the run has a figure {y!r}; {offered(y, names)}; `out` names a file")
        picture = draw_curves({f"{self.result.model}, {self.result.algorithm}": measured}, Axes(x="rounds", y=y))
        if out is not None:
            picture.write(Path(out))
        return picture


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
    _check_names(options)
    check_trained(model, algorithm, settings)
    of_kind("users", users, (str, Population), "a data set's name, or a Population: Population.of(names, shards)")
    of_kind("on_round", on_round, (Callable,), "a function of a round's number and its point")
    given = Overrides(
        users=None if isinstance(users, str) else users,
        model=None if isinstance(model, str) else model,
        algorithm=None if isinstance(algorithm, str) else algorithm,
    )
    named: dict[str, Any] = {
        "model": model if isinstance(model, str) else model.name,
        "dataset": users if isinstance(users, str) else "given",
        "algorithm": algorithm if isinstance(algorithm, str) else algorithm.name,
        "settings": dict(settings or {}),
    }
    config = to_config(_completed({**named, **options}, given))
    if out is None:
        return _in_memory(given.named(config), given, on_round)
    if given != Overrides():
        raise EngineError(
            "a run in a folder is loaded again when it is resumed, so it takes names alone: give model, users and "
            "algorithm as package.module:function (docs/simulation.md), or leave `out` out"
        )
    from muster.run_folders import start  # draws

    start(Path(out), config, on_round)
    return kept_in(Path(out), given)


def kept_in(folder: Path, given: Overrides) -> Run:
    """The run in a folder, which is done. given: what its configuration does not name."""
    run = read_run(folder)
    if run.result is None:
        raise RunError(f"the run in {folder} has no result yet; go on with it by --resume={folder}")
    untrained = partial(model_of, run.config, given)
    return Run(run.result, list(run.points), _params(run.vectors()), folder, read_tensors(folder), untrained)


load = speaking_python(datasets.load)


def _check_names(options: Iterable[str]) -> None:
    keywords = list(inspect.signature(simulate).parameters)
    for name in options:
        if name not in keywords:
            meant = CALLED.get(name, name)
            raise TypeError(f"simulate() has no option {name!r}; {offered(meant, keywords)}")


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
    return Run(result, points, params, None, training.tensors(), untrained)


def _params(vectors: Mapping[str, Any]) -> Float32 | None:
    """The model among the vectors of a training; None with a linear baseline."""
    return np.asarray(vectors[PARAMS], np.float32) if PARAMS in vectors else None
