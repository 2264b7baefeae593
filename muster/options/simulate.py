"""Options of `muster simulate`: those of a simulation, which files have by the same names."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from coordinator.rules.task_settings import TaskSettings
from fedcore.validation import build, build_one
from muster.options.compress import COMPRESS
from muster.options.key_values import parse_key_values
from muster.options.settings import with_settings
from muster.output import Settings

if TYPE_CHECKING:
    from simulator.configuration import SimulationConfig

T = TypeVar("T")
PRIVACY = (
    "Noise on every sum, of clipped reports (clip_norm): delta with epsilon, from which the noise follows, or with "
    "noise_multiplier; mechanism (gaussian, tree, banded with bands, or with --secagg distributed), "
    "min_separation_rounds, poisson; may be repeated."
)
ALGORITHM = "An algorithm (`muster algorithms list`), or your own as package.module:Class.  [default: fedavg]"
DATASET = (
    "A data set by name (`muster data list`), package.module:function, or a path to npz or Parquet files.  "
    "[default: digits]"
)
PARTITION = (
    "How examples are dealt to clients: dirichlet:ALPHA, pachinko:ALPHA,BETA, shards:PER_CLIENT, quantity:BETA or "
    "shuffled; by default by user, or dirichlet:0.3 where there are no users."
)
CLIENTS = "Number of clients; without --partition, a random sample of users.  [default: all]"
BASELINE = (
    "Instead of federated training: pooled (one client has all examples), local (every user alone), or dane, cocoa, "
    "sparse_fsvrg (models ridge, logistic)."
)
ENGINE = (
    "What trains users: torch, several at once; graphs, one by one on what devices run, after an export of seconds; or "
    "auto, which is torch, and graphs for a model that torch cannot run.  [default: auto]"
)
TARGET = "End when held-out users reach this accuracy, from 0 to 1."
PATIENCE = "End when their loss has not fallen for so many rounds."
DEVICE = (
    "Where to compute: cpu; cuda, or a certain GPU as cuda:1; or cuda:all, every GPU with a process of its own.  "
    "[default: cpu]"
)
PROCESSES = "Processes that train; on the CPU their number changes no result.  [default: one for each core]"
AT_ONCE = (
    "Clients that torch trains together; fewer need less memory. Another number rounds otherwise: results differ by "
    "round-off, not bit for bit the same.  [default: what suits model and device]"
)
PLAN = (
    "A plan bundle to train as it is: on its graphs, from its weights, with its algorithm and settings. --model and "
    "--algorithm then say where your own are imported from."
)
RAY = (
    "Train on the workers of a Ray cluster: that of this machine (auto), a new one on this machine (local), or the one "
    "at HOST:PORT. --processes is then how many.  [default: one for each of its CPUs, or GPUs]"
)


with_shared_settings = with_settings(TaskSettings, spread=("secagg",), only=("schedule", "same_cohort", "secagg"))
"""Have a command take the settings that a simulation has in common with a task, as its parameter `settings`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The options of a simulation; None where one is not given."""

    model: Annotated[str | None, typer.Option(help="A built-in model or package.module:function.")] = None
    plan: Annotated[Path | None, typer.Option(metavar="BUNDLE", help=PLAN)] = None
    dataset: Annotated[str | None, typer.Option(help=DATASET)] = None
    data: Annotated[Path | None, typer.Option(help="The folder that holds data sets on disk.")] = None
    partition: Annotated[str | None, typer.Option(help=PARTITION)] = None
    clients: Annotated[int | None, typer.Option(help=CLIENTS)] = None
    algorithm: Annotated[str | None, typer.Option(help=ALGORITHM)] = None
    baseline: Annotated[str | None, typer.Option(help=BASELINE)] = None
    settings: Settings = None
    privacy: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help=PRIVACY)] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds to run.  [default: 100]")] = None
    cohort: Annotated[int | None, typer.Option(help="Users per round.  [default: 10]")] = None
    evaluate_every: Annotated[
        int | None, typer.Option(help="Rounds between two measurements on held-out users.  [default: 10]")
    ] = None
    target_accuracy: Annotated[float | None, typer.Option(help=TARGET)] = None
    patience: Annotated[int | None, typer.Option(metavar="ROUNDS", help=PATIENCE)] = None
    engine: Annotated[str | None, typer.Option(help=ENGINE)] = None
    device: Annotated[str | None, typer.Option(help=DEVICE)] = None
    processes: Annotated[int | None, typer.Option(help=PROCESSES)] = None
    at_once: Annotated[int | None, typer.Option(help=AT_ONCE)] = None
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help=RAY)] = None
    compress: Annotated[str | None, typer.Option(metavar="STEPS", help=COMPRESS)] = None
    seed: Annotated[int | None, typer.Option(help="Seed of split, weights, cohorts, order.  [default: 0]")] = None

    def configuration(self, files: Sequence[Path], shared: Mapping[str, Any]) -> SimulationConfig:
        """The configuration of files, later ones before earlier ones, overridden by the options.

        shared: the settings that it has in common with a task, as `with_shared_settings` gives them.

        A wrong algorithm is reported before torch is loaded. A baseline may have other settings, which are looked at
        later.
        """
        from fedcore.algorithms import create, module_of

        read = {path: _read(path) for path in files}
        values: dict[str, Any] = {}
        for found in (*read.values(), self._given(shared)):
            values |= found
        settings = parse_key_values(self.settings)
        if settings:
            values["settings"] = {**values.get("settings", {}), **settings}
        if "plan" not in values and "baseline" not in values:
            algorithm = str(values.get("algorithm", "fedavg"))
            create(algorithm, values.get("settings"), [module_of(algorithm)])
        return _converted(values, read)

    def _given(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """The options that were given, but for the settings of the algorithm."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given["settings"] = None
        if self.privacy:
            from simulator.private_training import PrivateTraining

            given["privacy"] = build(PrivateTraining, parse_key_values(self.privacy, "--privacy"), text=True)
        given |= {name: build_one(TaskSettings, name, value, text=True) for name, value in shared.items()}
        return {name: value for name, value in given.items() if value is not None}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        from fedcore.errors import why

        raise typer.BadParameter(f"cannot read {path}: {why(error)}", param_hint="CONFIG.toml") from error
    if not isinstance(values.get("settings", {}), dict):
        raise typer.BadParameter("settings must be a table, [settings]", param_hint=str(path))
    return values


def _converted(values: dict[str, Any], read: Mapping[Path, dict[str, Any]]) -> SimulationConfig:
    """The configuration of all values. read: those of each file, for messages that name it."""
    from muster.output import loading

    with loading():
        from simulator.configuration import SimulationConfig, to_config
        from simulator.errors import EngineError
        from simulator.planned import completed_by_plan

    for path, found in read.items():
        for name, value in found.items():
            try:
                build_one(SimulationConfig, name, value)
            except EngineError as error:
                raise typer.BadParameter(str(error), param_hint=str(path)) from error
    if "plan" in values:
        values = completed_by_plan(values)
    if "model" not in values:
        raise typer.BadParameter("name a model, for instance --model mlp, or a plan with --plan", param_hint="--model")
    return to_config(values)
