"""`muster device`: one device, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster.commands.examples import examples_app
from muster.output import Json, emit, show_fields

device_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run a device.")
device_app.add_typer(examples_app, name="examples")


@device_app.command()
def run(
    coordinator: Annotated[str, typer.Option(help="The coordinator's URL.")],
    population: Annotated[str, typer.Option(help="The population to serve.")],
    examples: Annotated[Path, typer.Option(help="Local examples: an .npz file, or an example store.")],
    state: Annotated[Path, typer.Option(help="Where the device keeps its identity and cached plans.")] = Path("device"),
    backend: Annotated[str, typer.Option(help="What runs the graphs: onnxruntime or executorch.")] = "onnxruntime",
    once: Annotated[bool, typer.Option("--once", help="Run one session and end.")] = False,
    json: Json = False,
) -> None:
    """Check in, train when selected, report; again and again unless --once. Examples never leave the device.

    With --once the exit code is 0 when the session reported, 75 when there was no work now, 1 when it failed.
    """
    from device_runtime.session import DeviceConfig, Outcome, run_forever, run_session

    config = DeviceConfig(
        coordinator=coordinator, population=population, examples=examples, state=state, backend=backend
    )

    def tell(outcome: Outcome) -> None:
        if json:
            emit(outcome)
        else:
            place = f"task {outcome.task} round {outcome.round}" if outcome.task else ""
            typer.echo(" ".join(filter(None, [outcome.outcome, outcome.reason, place, outcome.detail])))

    if not once:
        run_forever(config, tell)
    outcome = run_session(config)
    tell(outcome)
    codes = {"reported": 0, "rejected": 75, "not-needed": 75}
    raise typer.Exit(codes.get(outcome.outcome, 1))


@device_app.command()
def conditions(
    state: Annotated[Path, typer.Option(help="The device's state folder, whose disk counts.")] = Path("device"),
    json: Json = False,
) -> None:
    """What this machine tells of charging, use, network, battery, space, memory and heat."""
    import msgspec

    from device_runtime.conditions import linux

    now = linux(storage=state)()
    if json:
        return emit(now)
    told = msgspec.structs.asdict(now)
    return show_fields({name: "unknown" if value is None else value for name, value in told.items()})


@device_app.command()
def build_executorch(
    arch: Annotated[str | None, typer.Option(help="x86_64 or aarch64; this machine's if not given.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write, if not the one where a device looks.")] = None,
    json: Json = False,
) -> None:
    """Build what `--backend executorch` needs, with pip and a C++ compiler: see docs/backends.md."""
    from device_runtime.native.build import build

    made = build(arch, out)
    if json:
        return emit(made)
    typer.echo(made.folder)
    sizes = made.files | {"together": made.size_bytes}
    return show_fields({name: f"{size / 1000:,.0f} kB" for name, size in sizes.items()})
