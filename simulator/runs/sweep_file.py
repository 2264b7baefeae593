"""A sweep as a file: simulations that differ in some options, in every combination or drawn at random."""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from export.errors import UnknownModel
from fedcore.decoding import converter
from fedcore.errors import AlgorithmError, ScheduleError, why
from simulator.configuration import SimulationConfig, to_config
from simulator.engines.computing import EVERY_GPU
from simulator.errors import RunError, SimulatorError
from simulator.simulation import Overrides, completed


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
