"""`muster fleet`: many emulated devices against a coordinator."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.options.simulate import Data
from muster.output import Json, emit, progress, show_fields, show_table

if TYPE_CHECKING:
    from simulator.fleet.fleet import Fleet, FleetSummary, Session
    from simulator.fleet.profile import Kind

fleet_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run a fleet of emulated devices.")


Profile = Annotated[
    Path | None, typer.Option(help="File with kinds of devices and their failures: see docs/emulators.md.")
]
Backends = Annotated[
    list[str] | None,
    typer.Option("--backend", help="onnxruntime or executorch; several take turns.  [default: onnxruntime]"),
]
Archs = Annotated[
    list[str] | None,
    typer.Option("--arch", help="x86_64 or aarch64; several take turns.  [default: this machine's]"),
]
Runtimes = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME:N,…",
        help="Devices of each runtime: python, node (in TypeScript), browser (in a Chromium), aarch64 (Python "
        "on emulated ARM).  [default: only python]",
    ),
]
Devices = Annotated[int | None, typer.Option(min=1, help="Number of devices.  [default: 60, or those of --runtime]")]
DEVICES = 60
Sessions = Annotated[int | None, typer.Option(min=1, help="Stop after this many sessions.  [default: no limit]")]
SIGNER = (
    "A public key; the devices accept only its plans and releases. May be repeated. Secure rounds need it.  "
    "[default: any plan, and no secure round]"
)
SecretFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="File of the secret that devices prove to know when they enrol.  [default: none]",
    ),
]


@fleet_app.command()
def run(
    coordinator: Annotated[str, typer.Option(help="The coordinator's URL.")],
    population: Annotated[str, typer.Option(help="The population that the devices serve.")],
    devices: Devices = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Devices awake at a time, at most.")] = 20,
    dataset: Annotated[str, typer.Option(help="Data set whose users' examples the devices hold.")] = "digits",
    data: Data = None,
    profile: Profile = None,
    backends: Backends = None,
    archs: Archs = None,
    runtimes: Runtimes = None,
    sessions: Sessions = None,
    signers: Annotated[list[str] | None, typer.Option("--signer", metavar="PUBLIC_KEY", help=SIGNER)] = None,
    enrolment_secret_file: SecretFile = None,
    seed: Annotated[int, typer.Option(help="Seed of the devices' times, and of a profile's draws.")] = 0,
    json: Json = False,
) -> None:
    """Run devices until the coordinator has no more work for them.

    Every device is an operating-system process with the real device runtime; it holds one training user's examples and
    speaks the device protocol. --concurrency must reach the task's goal times its over-selection. Devices of another
    architecture run under qemu in the sysroot of `muster fleet sysroot`; those on Node share a process, and those in
    browsers a Chromium, in which they open the coordinator's page. A --profile names its kinds' runtimes, architectures
    and backends itself.
    """
    from device_runtime.permission.policy import Policy
    from simulator import datasets
    from simulator.fleet.fleet import Fleet, FleetConfig

    kinds = _kinds(profile, archs, backends, runtimes)
    of_runtimes = sum(int(kind.weight) for kind in kinds) if runtimes else None
    if of_runtimes and devices not in {None, of_runtimes}:
        raise typer.BadParameter(f"--runtime says {of_runtimes}; leave this out", param_hint="--devices")
    users, _ = datasets.users(dataset, data, of_runtimes or devices or DEVICES)
    with tempfile.TemporaryDirectory(prefix="muster-fleet-") as folder:
        config = FleetConfig(
            coordinator=coordinator,
            population=population,
            folder=Path(folder),
            concurrency=min(concurrency, len(users)),
            sessions=sessions,
            seed=seed,
            policy=Policy(signers=tuple(signers or ())),
            enrolment_secret=enrolment_secret_file,
            kinds=kinds,
        )
        summary = _watched(Fleet(config, users), sessions)
    if json:
        return emit(_facts(summary))
    return _show(summary)


def _kinds(
    profile: Path | None, archs: list[str] | None, backends: list[str] | None, runtimes: str | None
) -> tuple[Kind, ...]:
    from simulator.fleet.fork_servers import HERE
    from simulator.fleet.profile import counted_kinds, equal_kinds, load_profile

    if (profile or runtimes) and (archs or backends):
        raise typer.BadParameter("it names architectures and backends itself", param_hint="--profile, --runtime")
    if profile and runtimes:
        raise typer.BadParameter("it names runtimes itself", param_hint="--profile")
    if runtimes:
        return counted_kinds(runtimes)
    return load_profile(profile) if profile else equal_kinds(archs or [HERE], backends or ["onnxruntime"])


def _watched(fleet: Fleet, sessions: int | None) -> FleetSummary:
    """Run a fleet behind a progress bar that says how its sessions ended so far."""
    endings: Counter[str] = Counter()
    with progress() as bar:
        line = bar.add_task("sessions", total=sessions, note="")

        def on_session(session: Session) -> None:
            endings[session.ending] += 1
            note = ", ".join(f"{ending} {count}" for ending, count in endings.most_common())
            bar.update(
                line, advance=1, note=f"round {session.outcome.round}: {note}" if session.outcome.round else note
            )

        return fleet.run(on_session)


def _facts(summary: FleetSummary) -> dict[str, object]:
    kinds = {
        kind: {"devices": count, "endings": dict(summary.by_kind.get(kind, {}))}
        for kind, count in summary.devices.items()
    }
    return {
        "devices": summary.devices.total(),
        "sessions": summary.endings.total(),
        "participants": len(summary.participants),
        "endings": dict(summary.endings),
        "kinds": kinds,
        "bytes_up": summary.bytes_up,
        "bytes_down": summary.bytes_down,
    }


def _show(summary: FleetSummary) -> None:
    columns = [(kind, summary.by_kind.get(kind, Counter())) for kind in summary.devices]
    rows = [
        (ending, *(counts[ending] for _, counts in columns), count) for ending, count in summary.endings.most_common()
    ]
    devices = ("devices", *summary.devices.values(), summary.devices.total())
    sessions = ("sessions", *(counts.total() for _, counts in columns), summary.endings.total())
    show_table(("how sessions ended", *(kind for kind, _ in columns), "all"), [devices, sessions, *rows])
    facts = _facts(summary)
    show_fields({name: facts[name] for name in ("participants", "bytes_up", "bytes_down")})


@fleet_app.command()
def sysroot(
    arch: Annotated[str, typer.Option(help="The architecture to emulate: aarch64.")] = "aarch64",
    out: Annotated[Path | None, typer.Option(help="The folder to make.  [default: where fleets look]")] = None,
    json: Json = False,
) -> None:
    """Make the sysroot of emulated ARM devices, in a checkout.

    It comes from Debian and PyPI, and needs no root: see docs/emulators.md. The first time takes a minute and 150 MB of
    downloads; again, only missing or changed parts are made.
    """
    from muster.commands.checkout import find_checkout
    from simulator.fleet.arm import ARCH

    if not find_checkout():
        raise typer.BadParameter(
            "an installed package cannot make a sysroot: clone the repository and run `make install` there"
        )
    from tools.arm.build import build

    if arch != ARCH:
        raise typer.BadParameter(f"only {ARCH} can be emulated, not {arch!r}", param_hint="--arch")
    with progress() as bar:
        line = bar.add_task("sysroot", total=None, note="")
        sysroot = build(out, lambda doing: bar.update(line, note=doing))
    if json:
        return emit(sysroot)
    size = f"{sysroot.size_bytes / 1e6:,.0f} MB"
    facts = {"folder": sysroot.folder, "qemu": sysroot.qemu, "backends": sysroot.backends, "size": size}
    return show_fields(facts | ({"lacks": sysroot.lacks} if sysroot.lacks else {}))
