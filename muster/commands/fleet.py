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
    archs: Annotated[
        list[str] | None,
        typer.Option("--arch", help="x86_64 or aarch64; several take turns.  [default: this machine's]"),
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many sessions.  [default: no limit]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of who wakes when.")] = 0,
    json: Json = False,
) -> None:
    """Run devices until the coordinator has no more work for them.

    Every device is an operating-system process with the real device runtime; it holds one training user's examples and
    speaks the device protocol. --concurrency must reach the task's goal times its over-selection. Devices of another
    architecture run under qemu in what `muster fleet sysroot` makes.
    """
    from simulator import datasets
    from simulator.emulators import HERE
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
            archs=tuple(archs or (HERE,)),
        )
        line = bar.add_task("sessions", total=sessions, note="")

        def on_outcome(client: str, outcome: Outcome) -> None:
            bar.update(line, advance=1, note=f"{client}: {outcome.outcome} {outcome.reason} round {outcome.round}")

        summary = Fleet(config, users).run(on_outcome)
    facts = {
        "devices": devices,
        "participants": len(summary.participants),
        "outcomes": dict(summary.outcomes),
        "by": {kind: dict(counts) for kind, counts in summary.by.items()},
        "bytes_up": summary.bytes_up,
        "bytes_down": summary.bytes_down,
    }
    if json:
        emit(facts)
    else:
        show_fields(facts)


@fleet_app.command()
def sysroot(
    arch: Annotated[str, typer.Option(help="aarch64: what can be emulated.")] = "aarch64",
    out: Annotated[Path | None, typer.Option(help="The folder to make, if not the one where a fleet looks.")] = None,
    json: Json = False,
) -> None:
    """Make what emulated ARM devices run in, from Debian and PyPI, without root: see docs/emulators.md.

    The first time takes a minute and 150 MB of downloads; again, only what is missing or changed is made.
    """
    from simulator.arm.sysroot import ARCH, build

    if arch != ARCH:
        raise typer.BadParameter(f"only {ARCH} can be emulated, not {arch!r}", param_hint="--arch")
    with progress() as bar:
        line = bar.add_task("sysroot", total=None, note="")
        made = build(out, lambda doing: bar.update(line, note=doing))
    if json:
        return emit(made)
    size = f"{made.size_bytes / 1e6:,.0f} MB"
    facts = {"folder": made.folder, "qemu": made.qemu, "backends": made.backends, "size": size}
    return show_fields(facts | ({"lacks": made.lacks} if made.lacks else {}))
