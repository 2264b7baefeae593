"""`muster device`: one device, on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.commands.examples import examples_app
from muster.output import Json, emit, show_fields, show_table

if TYPE_CHECKING:
    from device_runtime.conditions import Requirements
    from device_runtime.journal import Entry

device_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run a device.")
device_app.add_typer(examples_app, name="examples")


@device_app.command()
def run(
    coordinator: Annotated[str, typer.Option(help="The coordinator's URL.")],
    population: Annotated[str, typer.Option(help="The population to serve.")],
    examples: Annotated[Path, typer.Option(help="Local examples: an .npz file, or an example store.")],
    state: Annotated[Path, typer.Option(help="Where the device keeps its identity, journal and plans.")] = Path(
        "device"
    ),
    backend: Annotated[str, typer.Option(help="What runs the graphs: onnxruntime or executorch.")] = "onnxruntime",
    policy: Annotated[
        Path | None,
        typer.Option(help="What this device may do, see docs/device.md.  [default: policy.toml in the state folder]"),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=LEAST],…",
            help="What must hold before and during training: charging, idle, unmetered, min_battery=0.5, "
            "min_free_storage_bytes=…, min_free_memory_bytes=…, min_thermal_headroom_c=…; may be repeated.  "
            "[default: nothing]",
        ),
    ] = None,
    conditions: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE", help="Made-up conditions: a JSON file of seconds and values.  [default: this machine's]"
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Run one session and end.")] = False,
    json: Json = False,
) -> None:
    """Check in, train when selected, report; again and again unless --once. Examples never leave the device.

    Times to come back are honoured across restarts; --once runs its session now. What is required must be known to
    hold: `muster device conditions` shows what this machine tells.

    With --once the exit code is 0 when the session reported, 75 when there was no work now, 1 when it failed.
    """
    from device_runtime.conditions import linux, trace
    from device_runtime.device import Device
    from device_runtime.outcome import Outcome

    device = Device(
        coordinator,
        population,
        examples,
        state,
        policy=policy,
        conditions=linux(storage=state) if conditions is None else trace(conditions),
        requirements=_requirements(require or []),
        backend=backend,
    )

    def tell(outcome: Outcome) -> None:
        if json:
            emit(outcome)
        else:
            place = f"task {outcome.task} round {outcome.round}" if outcome.task else ""
            typer.echo(" ".join(filter(None, [outcome.outcome, outcome.reason, place, outcome.detail])))
            for notice in outcome.notices:
                typer.echo(f"  {notice}")

    if not once:
        return device.run_forever(threading.Event(), tell)
    outcome = device.run_once()
    tell(outcome)
    codes = {"reported": 0, "rejected": 75, "not-needed": 75, "not-now": 75}
    raise typer.Exit(codes.get(outcome.outcome, 1))


def _requirements(given: Sequence[str]) -> Requirements:
    """`charging,min_battery=0.5` as requirements. Raises typer.BadParameter."""
    import msgspec

    from device_runtime.conditions import Requirements

    pairs = [word.strip().partition("=") for text in given for word in text.split(",")]
    raw = {name: least if equals else True for name, equals, least in pairs}
    try:
        return msgspec.convert(raw, Requirements, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(Requirements.__struct_fields__)
        raise typer.BadParameter(f"{','.join(given)}: {error}; there is {known}", param_hint="--require") from error


@device_app.command()
def log(
    state: Annotated[Path, typer.Option(help="The device's state folder.")] = Path("device"),
    last: Annotated[int, typer.Option(min=1, help="Show so many entries, the newest.")] = 20,
    json: Json = False,
) -> None:
    """Show the device's journal: what was trained, when, for whom, what was sent, and how it ended."""
    from device_runtime.journal import read_journal

    entries = read_journal(state)[-last:]
    if json:
        return emit(entries)
    return show_table(["when", "how it ended", "for whom", "trained", "sent"], map(_cells, entries))


def _cells(entry: Entry) -> list[str]:
    """An entry for people: the table's columns, of several lines each."""
    ended = [entry.outcome, f"×{entry.times}" if entry.times > 1 else "", entry.reason and f"({entry.reason})"]
    trained = f"{entry.examples:,} examples, {entry.steps:,} steps, {entry.compute_s:.2f} s"
    return [
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.opened)),
        _lines(" ".join(filter(None, ended)), entry.receipt and f"receipt {entry.receipt[:12]}", entry.detail),
        _lines(entry.population, entry.coordinator, entry.task and f"{entry.task} round {entry.round}"),
        _lines(entry.plan, entry.plan_sha256[:12], trained if entry.steps else ""),
        _lines(f"{entry.bytes_up:,} B up", f"{entry.bytes_down:,} B down") if entry.coordinator else "–",
    ]


def _lines(*parts: str) -> str:
    return "\n".join(filter(None, parts)) or "–"


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
