"""Sweeps: many runs that differ in some options, each in a process and a folder of its own."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from export.errors import UnknownModel
from fedcore.errors import AlgorithmError, ScheduleError, why
from fedcore.validation import converter, decoder
from simulator import datasets
from simulator.configuration import SimulationConfig, to_config
from simulator.engines.computing import EVERY_GPU
from simulator.engines.processes import with_kept
from simulator.errors import Diverged, RunError, SimulatorError
from simulator.runs.reading import CONFIG, RESULT, differences, read_config, read_result
from simulator.runs.running import locked, resume_run, start_run
from simulator.simulation import Overrides, SimulationResult, check_users, completed


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers from `low` to `high`, drawn uniformly on a linear or a logarithmic scale; whole ones if both are."""

    low: int | float
    high: int | float
    scale: Literal["linear", "log"] = "linear"

    def at(self, share: float) -> int | float:
        """The number at a share of the way, from 0 to below 1."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        top = self.high + 1 if whole else self.high
        if self.scale == "log":
            value = math.exp(math.log(self.low) + share * (math.log(top) - math.log(self.low)))
        else:
            value = self.low + share * (top - self.low)
        return int(value) if whole else float(f"{value:.4g}")


class SweepFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sweep varies, by names of options, and the options that all its runs share."""

    options: dict[str, Any]
    grid: dict[str, Any] = {}
    random: dict[str, Any] = {}
    draws: int = 0
    draw_seed: int = 0


_to_file, _to_interval = converter(SweepFile), converter(Interval)


@dataclass(frozen=True, slots=True)
class SweepRun:
    """A run of a sweep. varied: its values of the options in which runs differ, by dotted name.

    given: objects in place of what the configuration names; such a run cannot be resumed.
    """

    name: str
    varied: Mapping[str, Any]
    config: SimulationConfig
    given: Overrides = Overrides()


def read_sweep(path: Path) -> list[SweepRun]:
    """The runs that a sweep's file asks for (docs/simulation.md). Raises RunError, naming the run and its option."""
    try:
        file = _to_file(tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise RunError(f"cannot read {path}: {why(error)}") from error
    return runs_of(file)


def runs_of(sweep: SweepFile, given: Overrides = Overrides()) -> list[SweepRun]:
    """The runs of a sweep, equal ones once. given: objects that all share. Raises as `read_sweep`."""
    runs: dict[str, SweepRun] = {}
    for varied in _combinations(sweep):
        name = _name_of(varied)
        if name in runs and runs[name].varied != varied:
            raise RunError(f"two runs would share the folder {name}; rename what differs in them")
        config = _config(sweep.options, varied, name, given)
        if config.device == EVERY_GPU:
            raise RunError(f"the run {name} cannot have all GPUs: every run of a sweep trains on one, such as cuda:0")
        if (config.processes or 1) > 1:
            raise RunError(
                f"the run {name} cannot have {config.processes} processes: the runs of a sweep train in one process "
                "each, and --processes of muster sweep says how many of them at a time"
            )
        runs[name] = SweepRun(name, varied, config, given)
    return list(runs.values())


def _combinations(file: SweepFile) -> list[dict[str, Any]]:
    """The varied options of every run: each combination of the grid, with each draw."""
    grid, random = _flat(file.grid), _flat(file.random)
    if not grid and not random:
        raise RunError(
            "a sweep varies something: give its grid lists of values, or say what is random, and how many draws"
        )
    if bool(random) != (file.draws > 0):
        raise RunError("[random] says what is drawn and `draws` how often: a sweep has both or none of them")
    for name, values in grid.items():
        if name in random:
            raise RunError(f"{name} is in [grid] and in [random]; leave it in one of them")
        if not isinstance(values, list) or not values:
            raise RunError(f"grid.{name} must be a list of values, not {values!r}")
    for name, values in [*grid.items(), *random.items()]:
        _check_plain(name, values)
    draws = [_drawn(random, file.draw_seed, number) for number in range(file.draws)] or [{}]
    return [
        dict(zip(grid, values, strict=True)) | draw for values in itertools.product(*grid.values()) for draw in draws
    ]


def _check_plain(name: str, values: Any) -> None:
    for value in values if isinstance(values, list) else []:
        if not isinstance(value, str | int | float):
            raise RunError(
                f"{name} can vary over texts, numbers, and true and false, not {value!r}; vary an option of a table by "
                "its dotted name, such as settings.client_lr"
            )


def _drawn(random: Mapping[str, Any], seed: int, number: int) -> dict[str, Any]:
    """Draw `number`, the same whatever the number of draws."""
    shares = np.random.Generator(np.random.Philox(key=[seed, number])).random(len(random)).tolist()
    return {name: _value_at(name, values, share) for (name, values), share in zip(random.items(), shares, strict=True)}


def _value_at(name: str, values: Any, share: float) -> Any:
    if isinstance(values, list) and values:
        return values[int(share * len(values))]
    try:
        interval = _to_interval(values)
    except msgspec.ValidationError as error:
        raise RunError(
            f"random.{name} must be a list, or an interval such as {{low = 0.01, high = 1.0, scale = 'log'}}: {error}"
        ) from error
    if not (interval.low < interval.high and (interval.scale == "linear" or interval.low > 0)):
        raise RunError(f"random.{name}: low must be below high, and above 0 on a logarithmic scale")
    return interval.at(share)


def _config(options: Mapping[str, Any], varied: Mapping[str, Any], name: str, given: Overrides) -> SimulationConfig:
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in options.items()}
    for key, value in varied.items():
        table, _, option = key.rpartition(".")
        into = values.setdefault(table, {}) if table else values
        if not isinstance(into, dict):
            raise RunError(f"options.{table} must be a table, as {key} varies, not {into!r}")
        into[option] = value
    if values.get("baseline") in {None, "pooled"}:
        values.setdefault("processes", 1)  # runs are parallel, not what one does
    try:
        return completed(to_config(values), given)
    except (SimulatorError, AlgorithmError, ScheduleError, UnknownModel) as error:
        raise RunError(f"the run {name} cannot be: {error}") from error


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A table with dotted names: `settings.client_lr`. An interval is a value."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        nested = isinstance(value, dict) and "low" not in value
        flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def _name_of(varied: Mapping[str, Any]) -> str:
    """A name for the folder of a run, which says how it differs."""
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in varied.items()]
    return re.sub(r"[^\w.,=+-]", "_", ",".join(words))


Status = Literal["done", "diverged", "failed"]
RUNS = "runs"
SEED = "seed"


class _End(msgspec.Struct, frozen=True):
    """How a run ended in its process, and why."""

    status: Status
    why: str = ""


_END = decoder(_End)


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """What came of a run of a sweep. why: it is not done; a run fails when its process raises or is killed.

    One that diverged has a result if its numbers stayed finite.
    """

    run: SweepRun
    status: Status
    result: SimulationResult | None = None
    why: str = ""

    @property
    def row(self) -> dict[str, Any]:
        """The run as a row of a table: its varied options, and its figures."""
        result = self.result
        return {
            **self.run.varied,
            "status": self.status,
            "rounds": result and result.rounds,
            "ended_by": result and result.ended_by,
            "test_accuracy": result and result.test_accuracy,
            "test_loss": result and result.test_loss,
            "user_mean": result and result.user_mean,
            "user_p5": result and result.per_user["p5"],
            "run": f"{RUNS}/{self.run.name}",
        }


def run_sweep(
    runs: Sequence[SweepRun],
    folder: Path,
    processes: int,
    on_end: Callable[[SweepOutcome], None] = lambda outcome: None,
) -> list[SweepOutcome]:
    """Run all that has no result yet, each in `folder`/runs/NAME; gives the outcomes in the order of the runs.

    processes: how many run at a time. on_end: called with every outcome when it is there. A run that fails or is killed
    keeps none of the others from running. Raises RunError, before any run, when another sweep is at work in the folder,
    when users of a run cannot be read or are too few, or when the folder of a run is that of another configuration:
    names of folders say only what varies.
    """
    _check_kept(runs, folder)
    _check_users([run for run in runs if not (folder / RUNS / run.name).exists()])
    (folder / RUNS).mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, SweepOutcome] = {}
    with contextlib.closing(locked(folder)):
        paths = [folder / RUNS / run.name for run in runs]
        kept = [_End("done") if (path / RESULT).exists() else None for path in paths]
        work = [functools.partial(_run, run, path) for run, path in zip(runs, paths, strict=True)]
        for index, ended in with_kept(kept, work, _END, processes):
            end = _End("failed", str(ended)) if isinstance(ended, Exception) else ended
            result = read_result(paths[index]) if end.status == "done" else None
            if result is not None and result.diverged is not None:
                end = _End("diverged", result.diverged)
            outcome = SweepOutcome(runs[index], end.status, result, end.why)
            outcomes[outcome.run.name] = outcome
            on_end(outcome)
    return [outcomes[run.name] for run in runs]


def means_over_seeds(outcomes: Sequence[SweepOutcome]) -> list[dict[str, Any]]:
    """A row for each choice of the varied options but the seed: mean figures of the runs that are done.

    `seeds` is how many those are, `deviation` the standard deviation of their accuracy.
    """
    groups: dict[tuple[Any, ...], list[SweepOutcome]] = {}
    for outcome in outcomes:
        key = tuple((name, value) for name, value in outcome.run.varied.items() if name != SEED)
        groups.setdefault(key, []).append(outcome)
    rows = []
    for key, group in groups.items():
        done = [outcome.result for outcome in group if outcome.result is not None]
        accuracies = [result.test_accuracy for result in done if result.test_accuracy is not None]
        rows.append(
            dict(key)
            | {
                "seeds": len(done),
                "test_accuracy": statistics.fmean(accuracies) if accuracies else None,
                "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "test_loss": statistics.fmean(result.test_loss for result in done) if done else None,
                "user_p5": statistics.fmean(result.per_user["p5"] for result in done) if done else None,
                "without a result": len(group) - len(done),
            }
        )
    return rows


def _check_kept(runs: Sequence[SweepRun], folder: Path) -> None:
    if (folder / CONFIG).exists():
        raise RunError(f"{folder} is the folder of a run; take another folder with --out")
    for run in runs:
        path = folder / RUNS / run.name
        different = differences(read_config(path), run.config) if path.exists() else []
        if different:
            raise RunError(
                f"{path} is of a sweep with other options; its run and the one that is asked for differ in "
                f"{', '.join(different)}. Take another folder with --out, or delete this one"
            )


def _check_users(runs: Sequence[SweepRun]) -> None:
    """Raise RunError where users cannot be read, or are too few. Those that runs share are read once."""
    load = functools.cache(datasets.load)
    for run in runs:
        config = run.config
        try:
            asked = config.dataset, config.data, config.clients, config.partition, config.columns
            users = run.given.users or load(*asked)
            check_users(config, users)
        except SimulatorError as error:
            raise RunError(f"the run {run.name} cannot be: {error}") from error


def _run(run: SweepRun, path: Path) -> _End:
    try:
        if path.exists():
            resume_run(path, run.config)
        else:
            start_run(path, run.config, given=run.given)
    except Diverged as error:
        return _End("diverged", str(error))
    return _End("done")
