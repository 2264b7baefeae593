"""`muster fleet` emulates devices, `muster forecast` computes with them in virtual time; and commands of a checkout."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from coordinator.errors import InvalidTask
from fedcore.validation import build
from muster.options import Data, configuration, values_of, with_settings
from muster.output import Json, emit, progress, remark, show_fields, show_table
from simulator.errors import ForecastError
from simulator.forecast.configuration import ForecastConfig

if TYPE_CHECKING:
    from simulator.configuration import SimulationConfig
    from simulator.fleet.fleet import Fleet, FleetSummary, Session
    from simulator.fleet.profile import Kind
    from simulator.forecast.course import CommittedRound
    from simulator.forecast.twin import Forecast


# `muster bench` and `muster study`: commands of a checkout, whose code is in no wheel.


_CHECKOUT = Path(__file__).parents[2]
_COMMANDS = {"bench": ("benchmarks", "benchmarks.runner"), "study": ("studies", "research.command")}
"""What each command runs, and the module whose `add_to` adds the command."""


def add_checkout(app: typer.Typer, checkout: Path = _CHECKOUT) -> None:
    """Add both commands; outside a checkout each says what is missing."""
    found = find_checkout(checkout)
    for name, (what, module) in _COMMANDS.items():
        if found:
            import_module(module).add_to(app)
        else:
            app.command(name, help=f"Run {what}, in a checkout.", context_settings=_ANYTHING)(_missing(what))


def find_checkout(checkout: Path = _CHECKOUT) -> bool:
    """Whether this is a checkout; then its folders `benchmarks`, `research` and `tools` can be imported."""
    is_checkout = all((checkout / name).is_file() for name in ("pyproject.toml", "benchmarks/runner.py"))
    if is_checkout and str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    return is_checkout


_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


def _missing(what: str) -> Callable[[], None]:
    def missing() -> None:
        raise typer.BadParameter(
            f"{what} are part of the source checkout: `git clone` the repository and run `make install` there"
        )

    return missing


# `muster fleet`: many emulated devices against a coordinator.


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
        help="Devices of each runtime: python, node (in TypeScript), browser (in a Chromium), jvm (in Kotlin), "
        "aarch64 (Python on emulated ARM).  [default: only python]",
    ),
]
Devices = Annotated[int | None, typer.Option(min=1, help="Number of devices.  [default: 60, or those of --runtime]")]
DEVICES = 60
Sessions = Annotated[int | None, typer.Option(min=1, help="Stop after this many sessions.  [default: no limit]")]
SIGNER = (
    "A public key; the devices accept only its plans and releases. May be repeated. Secure rounds need it.  "
    "[default: any plan, and no secure round]"
)
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="NAME=VALUE:SHARE",
        help="A label that this share of the devices draws and tells, like region=eu:0.3; may be repeated.  "
        "[default: none]",
    ),
]
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
    labels: Labels = None,
    enrolment_secret_file: SecretFile = None,
    seed: Annotated[int, typer.Option(help="Seed of the devices' times, and of a profile's draws.")] = 0,
    json: Json = False,
) -> None:
    """Run devices until the coordinator has no more work for them.

    Every device is an operating-system process with the real device runtime; it holds one training user's examples and
    speaks the device protocol. --concurrency must reach the task's goal times its over-selection. Devices of another
    architecture run under qemu in the sysroot of `muster fleet sysroot`; those on Node share a process, those on the
    JVM another, and those in browsers a Chromium, in which they open the coordinator's page. A --profile names its
    kinds' runtimes, architectures and backends itself.
    """
    from device_runtime.permission.policy import Policy
    from simulator import datasets
    from simulator.fleet.fleet import Fleet, FleetConfig

    kinds = _labelled(_kinds(profile, archs, backends, runtimes), labels or ())
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
    return _show_summary(summary)


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


def _labelled(kinds: tuple[Kind, ...], labels: Sequence[str]) -> tuple[Kind, ...]:
    try:
        return tuple(msgspec.structs.replace(kind, labels=(*kind.labels, *labels)) for kind in kinds)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--label") from error


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


def _show_summary(summary: FleetSummary) -> None:
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
    from simulator.fleet.fork_servers import ARCH

    if not find_checkout():
        raise typer.BadParameter(
            "an installed package cannot make a sysroot: clone the repository and run `make install` there"
        )
    from tools.arm import build

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


# `muster forecast`: how long a task will take on a population, in virtual time.


PLAN = "A bundle whose certificate gives --example-s, --bytes-down and --bytes-up, unless given."
TRAIN = "Train the cohorts that were drawn: a file of options of `muster simulate`. Accuracy then has its hours."
BESIDE = "Another task of the same population: a file of its options; may be repeated. A row for each task."
VARY = "Compare values of one setting, such as goal=50,100,200: a row for each."
PLOT = "Draw the rounds that are done over virtual time, with --train the accuracy: .svg or .png."
_NOT_SHOWN = ("beside", "check_ins_by_hour", "rounds_by_hour")


@with_settings(ForecastConfig)
def forecast(
    *,
    settings: dict[str, Any],
    plan: Annotated[Path | None, typer.Option(help=PLAN)] = None,
    train: Annotated[Path | None, typer.Option(metavar="CONFIG.toml", help=TRAIN)] = None,
    beside: Annotated[list[Path] | None, typer.Option(metavar="TASK.toml", help=BESIDE)] = None,
    vary: Annotated[str | None, typer.Option(metavar="SETTING=VALUE,…", help=VARY)] = None,
    plot: Annotated[Path | None, typer.Option(help=PLOT)] = None,
    json: Json = False,
) -> None:
    """Tell how a task would go, before a phone sees it.

    The coordinator's own rules run in virtual time on modelled devices: each is charged and idle for a stretch of most
    nights, has its own speed, bandwidth and number of examples, and vanishes now and then. A profile that can fill no
    round is refused at once, with the setting that starves it. For example, a day of a million devices, then which goal
    gets there first:

    \b
      muster forecast --devices 1000000 --goal 500
      muster forecast --devices 100000 --vary goal=50,100,200 --plot rounds.svg
      muster forecast --devices 10000 --goal 50 --train simulation.toml
    """
    if plan is not None:
        settings = {**_costs(plan), **settings}
    configs = _varied(settings, vary)
    training = None if train is None else configuration([train], {})
    tasks = {path.stem: values_of(path) for path in beside or ()}
    found = {name: _forecast(name, config, training, tasks) for name, config in configs.items()}
    if tasks:
        names = [f"{name}, {task}" for name in found for task in ("this task", *tasks)]
        found = dict(zip(names, (one for first in found.values() for one in (first, *first.beside)), strict=True))
    if plot is not None:
        from muster.pictures import draw_forecasts

        draw_forecasts(found).save(plot)
        remark(f"picture: {plot}")
    first = next(iter(found.values()))
    if json:
        return emit(first if vary is None else found)
    if len(found) > 1 or vary is not None:
        return _compare(found)
    return _show_forecast(first, next(iter(configs.values())))


def _costs(plan: Path) -> dict[str, str]:
    from fedcore.bundle import Bundle
    from simulator.forecast.twin import costs_of

    return {name: str(value) for name, value in costs_of(Bundle(plan)).items()}


def _varied(settings: dict[str, Any], vary: str | None) -> Mapping[str, ForecastConfig]:
    """The configurations by the name that they have in tables; all are checked before one runs."""
    if vary is None:
        config = build(ForecastConfig, settings, text=True)
        return {f"{config.devices:,} devices": config}
    name, equals, values = vary.partition("=")
    if not equals:
        raise typer.BadParameter(f"{vary!r} is not of the form goal=50,100,200", param_hint="--vary")
    name = name.replace("-", "_")
    return {
        f"{name}={value}": build(ForecastConfig, {**settings, name: value}, text=True) for value in values.split(",")
    }


def _forecast(
    name: str, config: ForecastConfig, training: SimulationConfig | None, tasks: Mapping[str, Mapping[str, Any]]
) -> Forecast:
    """The forecast, behind a progress bar of virtual hours, and one of rounds where it trains."""
    from simulator.forecast.twin import forecast as run

    with progress() as bar:
        shown = bar.add_task(name, total=24 * config.days, note="virtual hours")

        def train(rounds: Sequence[CommittedRound]) -> list[tuple[float, float]]:
            if training is None:
                return []
            from simulator.forecast.training import accuracy_over_time

            trained = bar.add_task(name, total=min(training.rounds, len(rounds)), note="rounds of training")
            return accuracy_over_time(training, rounds, lambda number, _: bar.update(trained, completed=number))

        others = [_beside(task, config, given) for task, given in tasks.items()]
        return run(config, lambda hour: bar.update(shown, completed=hour), train, others)


def _beside(task: str, config: ForecastConfig, given: Mapping[str, Any]) -> ForecastConfig:
    try:
        return config.beside(given)
    except (ForecastError, InvalidTask) as error:
        raise typer.BadParameter(f"{task}: {error}", param_hint="--beside") from error


def _show_forecast(found: Forecast, config: ForecastConfig) -> None:
    facts = {name: value for name, value in msgspec.to_builtins(found).items() if name not in _NOT_SHOWN}
    absent: dict[str, object] = {"paused": "", "accuracy": [], "matching": None, "untold": None}
    facts = {name: value for name, value in facts.items() if name not in absent or value != absent[name]}
    show_fields(facts)
    if found.done_at_h is None:
        remark(f"{config.rounds} rounds take longer: {found.rounds} were done in {config.days} days; raise --days")


def _compare(found: Mapping[str, Forecast]) -> None:
    rows = [
        (
            name,
            one.rounds,
            one.done_at_h,
            one.round_s and one.round_s.p50,
            one.check_ins,
            one.reports,
            one.wasted,
            one.never_took_part,
            one.phone.cpu_s,
            one.accuracy[-1][1] if one.accuracy else None,
        )
        for name, one in found.items()
    ]
    figures = ("rounds", "done at h", "round s", "check-ins", "reports", "wasted", "never", "phone cpu s", "accuracy")
    show_table(("", *figures), rows)
