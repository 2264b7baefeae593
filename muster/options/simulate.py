"""Options of `muster simulate`: the settings of a simulation, which files have by the same names."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcore.validation import build_one
from muster.options.settings import with_settings
from simulator.configuration import DATA, SimulationConfig, check_names, to_config
from simulator.errors import EngineError

Data = Annotated[Path | None, typer.Option(help=DATA)]
"""The option of a command that reads data sets."""
with_simulation_settings = with_settings(SimulationConfig, spread=("secagg",), defaults={"model": None})
"""Have a command take the settings of a simulation as options; its parameter `settings` gets those given."""


def configuration(files: Sequence[Path], settings: Mapping[str, Any]) -> SimulationConfig:
    """The configuration of files, later ones before earlier ones, overridden by the options that were given.

    A wrong algorithm is reported before torch is loaded. A baseline may have other settings, which are looked at later.
    """
    from fedcore.algorithms import create, module_of

    values: dict[str, Any] = {}
    for path in files:
        values |= _read(path)
    chosen = {name: build_one(SimulationConfig, name, value, text=True) for name, value in settings.items()}
    if "settings" in chosen:
        chosen["settings"] = {**values.get("settings", {}), **chosen["settings"]}
    values |= chosen
    if "plan" not in values and "baseline" not in values:
        algorithm = str(values.get("algorithm", "fedavg"))
        create(algorithm, values.get("settings"), [module_of(algorithm)])
    if "plan" in values:
        values = _completed(values)
    if "model" not in values:
        raise typer.BadParameter("name a model, for instance --model mlp, or a plan with --plan", param_hint="--model")
    return to_config(values)


def values_of(path: Path) -> dict[str, Any]:
    """The values of a file of options, as TOML has them. Raises BadParameter."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        from fedcore.errors import why

        raise typer.BadParameter(f"cannot read {path}: {why(error)}", param_hint="CONFIG.toml") from error


def _read(path: Path) -> dict[str, Any]:
    values = values_of(path)
    try:
        check_names(values)
        return {name: build_one(SimulationConfig, name, value) for name, value in values.items()}
    except EngineError as error:
        raise typer.BadParameter(str(error), param_hint=str(path)) from error


def _completed(values: Mapping[str, Any]) -> dict[str, Any]:
    from muster.output import loading

    with loading():
        from simulator.planned import completed_by_plan

    return completed_by_plan(values)
