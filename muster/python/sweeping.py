"""Sweeps from Python: simulations that differ in some keywords, on all cores, and what came of them as a table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.model import ModelSpec
from fedcore.algorithms.algorithm import Algorithm
from fedcore.notebook import table_of
from muster.python.arguments import of_kind, speaking_python
from muster.python.progress import progress_line
from muster.python.simulating import (
    CALLED,
    DEFAULT_ALGORITHM,
    NAMES_ALONE,
    Run,
    arguments_of,
    check_keywords,
    frame_of,
    kept_in,
)
from simulator.configuration import without_numpy
from simulator.course import ACCURACY
from simulator.engines.threads import one_thread
from simulator.engines.workers.processes import usable_cores
from simulator.errors import EngineError
from simulator.population import Population
from simulator.runs.sweep_file import SweepFile, SweepRun, runs_of
from simulator.runs.sweeping import RUNS, SEED, SweepOutcome, means_over_seeds, run_sweep
from simulator.simulation import Overrides

if TYPE_CHECKING:
    import pandas as pd

    from muster.pictures.picture import Picture


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
        from muster.python.plotting import plot  # draws

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
