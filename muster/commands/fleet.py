"""`muster fleet`: many emulated devices against a coordinator."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.output import Json, emit, progress, show_fields

if TYPE_CHECKING:
    from device_runtime.outcome import Outcome

fleet_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run a fleet of emulated devices.")


@fleet_app.command()
def run(
    coordinator: Annotated[str, typer.Option(help="The coordinator's URL.")],
    population: Annotated[str, typer.Option(help="The population that the devices serve.")],
    devices: Annotated[int, typer.Option(min=1, help="How many devices there are.")] = 60,
    concurrency: Annotated[int, typer.Option(min=1, help="How many are awake at a time.")] = 20,
    dataset: Annotated[str, typer.Option(help="Whose users' examples the devices hold.")] = "digits",
    data: Annotated[Path | None, typer.Option(help="The folder that holds data sets on disk.")] = None,
    backends: Annotated[
        list[str] | None,
        typer.Option("--backend", help="onnxruntime or executorch; several take turns.  [default: onnxruntime]"),
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many sessions.  [default: no limit]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of who wakes when.")] = 0,
    json: Json = False,
) -> None:
    """Run devices until the coordinator has no more work for them.

    Every device is an operating-system process with the real device runtime; it holds one training user's examples and
    speaks the device protocol. --concurrency must reach the task's goal times its over-selection.
    """
    from simulator import datasets
    from simulator.fleet import Fleet, FleetConfig

    users, _ = datasets.users(dataset, data, devices)
    with tempfile.TemporaryDirectory(prefix="muster-fleet-") as folder, progress() as bar:
        config = FleetConfig(
            coordinator=coordinator,
            population=population,
            folder=Path(folder),
            concurrency=min(concurrency, devices),
            sessions=sessions,
            seed=seed,
            backends=tuple(backends or ("onnxruntime",)),
        )
        line = bar.add_task("sessions", total=sessions, note="")

        def on_outcome(client: str, outcome: Outcome) -> None:
            bar.update(line, advance=1, note=f"{client}: {outcome.outcome} {outcome.reason} round {outcome.round}")

        summary = Fleet(config, users).run(on_outcome)
    facts = {
        "devices": devices,
        "participants": len(summary.participants),
        "outcomes": dict(summary.outcomes),
        "bytes_up": summary.bytes_up,
        "bytes_down": summary.bytes_down,
    }
    if json:
        emit(facts)
    else:
        show_fields(facts)
