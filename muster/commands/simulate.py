"""`muster simulate`: the vectorised engine on a data set with users."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from muster.output import (
    Json,
    Settings,
    emit,
    loading,
    parse_settings,
    progress,
    show_fields,
)
from muster.schedule_option import Schedule, parse_schedule

ALGORITHM = "An algorithm (`muster algorithms list`), or your own as package.module:Class.  [default: fedavg]"
PARTITION = (
    "How examples are dealt to clients: dirichlet:ALPHA, pachinko:ALPHA,BETA, shards:PER_CLIENT, quantity:BETA or "
    "shuffled; by default by user, or dirichlet:0.3 where there are no users."
)
CLIENTS = "To how many clients.  [default: the number of users]"
BASELINE = (
    "Instead of federated training: pooled (one client has all examples), local (every user alone), or dane, cocoa, "
    "sparse_fsvrg (models ridge, logistic)."
)

ENGINE = (
    "What trains users: torch, several at once; graphs, one by one on what devices run, after an export of seconds; or "
    "auto, which measures a few steps of both where that pays and keeps the figures in your cache.  [default: auto]"
)
PROCESSES = "Processes that train, on the CPU; their number changes no result.  [default: one for each core]"

if TYPE_CHECKING:
    from simulator.simulation import SimulationConfig, SimulationResult


def simulate(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Options by name, and [settings]; flags override.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A built-in model or package.module:function.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A data set by name (docs/datasets.md).  [default: digits]")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The folder that holds data sets on disk.")] = None,
    partition: Annotated[str | None, typer.Option(help=PARTITION)] = None,
    clients: Annotated[int | None, typer.Option(help=CLIENTS)] = None,
    algorithm: Annotated[str | None, typer.Option(help=ALGORITHM)] = None,
    baseline: Annotated[str | None, typer.Option(help=BASELINE)] = None,
    settings: Settings = None,
    schedule: Schedule = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds to run.  [default: 100]")] = None,
    cohort: Annotated[int | None, typer.Option(help="Users per round.  [default: 10]")] = None,
    engine: Annotated[str | None, typer.Option(help=ENGINE)] = None,
    same_cohort: Annotated[
        bool | None, typer.Option("--same-cohort", help="Of an algorithm of two trips: the same users in both.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: cpu or cuda.  [default: cpu]")] = None,
    processes: Annotated[int | None, typer.Option(help=PROCESSES)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of split, weights, cohorts, order.  [default: 0]")] = None,
    json: Json = False,
) -> None:
    """Train over simulated users, measure on users never seen.

    Or run a baseline for comparison. Users are split into train and held-out ones; accuracy is per example over all
    held-out users, and per user as percentiles. The same seed and engine give the same model, bit for bit, on the same
    machine.
    """
    flags: dict[str, Any] = {
        "model": model,
        "dataset": dataset,
        "data": data,
        "partition": partition,
        "clients": clients,
        "algorithm": algorithm,
        "baseline": baseline,
        "rounds": rounds,
        "cohort": cohort,
        "engine": engine,
        "same_cohort": same_cohort,
        "device": device,
        "processes": processes,
        "seed": seed,
    }
    if schedule:
        flags["schedule"] = parse_schedule(schedule)
    result = _run(_options(config, flags, parse_settings(settings)))
    return emit(result) if json else _show(result)


def _show(result: SimulationResult) -> None:
    facts = dataclasses.asdict(result)
    del facts["curve"]
    show_fields(facts)


def _run(options: dict[str, Any]) -> SimulationResult:
    """Run the simulation that the options ask for, and show how far it is."""
    with loading():
        import torch

        from simulator.simulation import simulate as run

    torch.set_num_threads(1)  # small batches: a second thread costs more than it gives
    chosen = _configuration(options)
    with progress() as bar:
        task = bar.add_task(f"{chosen.model} · {chosen.baseline or chosen.algorithm}", total=chosen.rounds, note="")

        def on_round(number: int, metrics: dict[str, float]) -> None:
            loss = next(value for name, value in metrics.items() if name.endswith(".loss"))
            bar.update(task, completed=number, note=f"train loss {loss:.3f}")

        return run(chosen, on_round)


def _options(path: Path | None, flags: dict[str, Any], settings: dict[str, object]) -> dict[str, Any]:
    """The options of the file, overridden by the flags. A wrong algorithm is reported before torch is loaded.

    A baseline may have other settings, which are looked at later.
    """
    from fedcore.algorithms import create, module_of

    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise typer.BadParameter(f"cannot read {path}: {error}", param_hint="CONFIG.toml") from error
    values |= {name: value for name, value in flags.items() if value is not None}
    if settings:
        values["settings"] = {**values.get("settings", {}), **settings}
    if isinstance(values.get("settings", {}), dict) and "baseline" not in values:
        algorithm = str(values.get("algorithm", "fedavg"))
        create(algorithm, values.get("settings"), [module_of(algorithm)])
    return values


def _configuration(values: dict[str, Any]) -> SimulationConfig:
    from fedcore.names import offered
    from simulator.simulation import SimulationConfig, to_config

    known = {field.name: field for field in dataclasses.fields(SimulationConfig)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise typer.BadParameter(f"unknown options {unknown}; {offered(unknown[0], known)}", param_hint="CONFIG.toml")
    if "model" not in values:
        raise typer.BadParameter("name a model, for instance --model mlp", param_hint="--model")
    try:
        return to_config(values)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error), param_hint="CONFIG.toml") from error
