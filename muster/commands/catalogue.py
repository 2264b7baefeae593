"""Starting points: `muster demo`, `muster algorithms`, `muster data` and `muster new`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from muster import output
from muster.options import (
    Data,
    DropMissing,
    InputColumns,
    TargetColumn,
    UserColumn,
    columns_of,
    parse_key_values,
)
from muster.project import make_project

if TYPE_CHECKING:
    from coordinator.rules.private_sums import ReportBytes
    from fedcore.algorithms.facts import AlgorithmFacts, Size, TripFacts
    from muster.local.demo_tasks import DemoResult, OnProgress
    from muster.local.fleet import AppResult
    from simulator.datasets import Dataset, PopulationFacts
    from simulator.population import Population


algorithms_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at the federated algorithms.")


@algorithms_app.command("list")
def list_algorithms(json: output.Json = False) -> None:
    """List every built-in algorithm, with its sizes.

    Also its family, and whether it runs on devices. Sizes are numbers of values, for a model of d parameters, with the
    default settings. A second trip follows a comma.
    """
    from fedcore.algorithms import ALGORITHMS, create
    from fedcore.algorithms.facts import facts_of

    algorithms = [facts_of(create(name)) for name in ALGORITHMS]
    if json:
        return output.emit(algorithms)
    columns = ("algorithm", "family", "down", "up", "server state", "trips", "cross-device", "paper")
    return output.show_table(columns, [_cells(facts) for facts in algorithms])


@algorithms_app.command("show")
def show_algorithm(
    name: Annotated[
        str, typer.Argument(help="An algorithm of the list, or your own as package.module:Class or file.py:Class.")
    ],
    settings: output.Settings = None,
    json: output.Json = False,
) -> None:
    """Show an algorithm: its equations and settings.

    Also what device and server do. Sizes are numbers of values, for a model of d parameters. They are those of the
    settings given with --set.
    """
    from fedcore.algorithms import create, module_of
    from fedcore.algorithms.check import check
    from fedcore.algorithms.facts import facts_of

    algorithm = create(name, parse_key_values(settings), [module_of(name)])
    check(algorithm)
    facts = facts_of(algorithm)
    if json:
        return output.emit(facts)
    for line in (facts.summary, "", *facts.equations.splitlines(), ""):
        output.say(line)
    output.show_fields(_outline(facts))
    output.say()
    columns = ("setting", "value", "what it may be", "meaning")
    return output.show_table(
        columns, [(setting.name, setting.value, setting.values, setting.meaning) for setting in facts.settings]
    )


def _cells(facts: AlgorithmFacts) -> tuple[object, ...]:
    from fedcore.algorithms.facts import total

    sizes = (", ".join(map(str, facts.down)), ", ".join(map(str, facts.up)), total(facts.state), total(facts.kept))
    return (facts.name, facts.family, *sizes, len(facts.trips), facts.paper)


def _outline(facts: AlgorithmFacts) -> dict[str, object]:
    """What device and server do, in a line each."""
    lines: dict[str, object] = {"family": facts.family}
    for number, trip in enumerate(facts.trips, 1):
        of_trip = f" in trip {number}" if len(facts.trips) > 1 else ""
        lines[f"device receives{of_trip}"] = _vectors(trip.down)
        lines[f"device runs{of_trip}"] = _runs(trip)
        lines[f"device reports{of_trip}"] = _vectors(trip.up)
    means = "weighed by examples" if facts.weighting == "examples" else "each device alike"
    lines["server takes"] = f"the mean over the cohort, {means}"
    lines["server keeps"] = _vectors(facts.state)
    return lines | {"device keeps": _vectors(facts.kept) or "nothing"}


def _vectors(sizes: dict[str, Size]) -> str:
    return ", ".join(f"{name} ({size})" for name, size in sizes.items())


def _runs(trip: TripFacts) -> str:
    passes = [
        f"{sweep.name} ({sweep.epochs} × all examples in batches of {sweep.batch_size}"
        f"{f', at most {sweep.steps} steps' if sweep.steps else ''})"
        for sweep in trip.passes
    ]
    return ", then ".join(passes)


data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at data sets, and check them.")

SHOWN, BAR = 20, 40
"""Classes of a histogram, and the characters of its longest bar."""


@data_app.command("list")
def list_datasets(json: output.Json = False) -> None:
    """List every data set that has a name.

    Also how many clients it has, where its files belong, its licence, and what it is. `muster data show NAME` says its
    source and its files.
    """
    from simulator.datasets import DATASETS, folder_of
    from simulator.datasets.bundled import SOURCES

    if json:
        return output.emit([_listed(name, dataset) for name, dataset in DATASETS.items()])
    rows = [
        (
            *(name, dataset.clients or "its users", f"DIR/{folder_of(name)}" if dataset.on_disk else "–"),
            *(SOURCES[folder_of(name)].licence if dataset.on_disk else "–", dataset.about),
        )
        for name, dataset in DATASETS.items()
    ]
    return output.show_table(("data set", "clients", "on disk", "licence", "what"), rows)


@data_app.command("show")
def show_dataset(
    name: Annotated[
        str, typer.Argument(help="A data set of the list, package.module:function, file.py:function, or a path.")
    ],
    data: Data = None,
    user: UserColumn = "",
    inputs: InputColumns = "",
    target: TargetColumn = "",
    drop_missing: DropMissing = False,
    partition: Annotated[str | None, typer.Option(help="How examples are dealt to clients, as dirichlet:0.3.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="To how many clients, or how many of the users.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture of users and classes: .svg or .png.")
    ] = None,
    json: output.Json = False,
) -> None:
    """Show what a data set holds: users, examples, classes.

    Sizes are percentiles over users. The histogram has the most frequent classes, or tokens. Of a data set on disk,
    without --data: its source and licence, its files, and where they belong.
    """
    from simulator import datasets
    from simulator.datasets import facts_of

    columns = columns_of(user, inputs, target, drop_missing=drop_missing)
    if data is None and datasets.describe(name, columns).on_disk:
        return output.answer(_source(name), json)
    users = datasets.load(name, data, clients, partition, columns)
    if out is not None:
        _draw(users, name if partition is None else f"{name}, {partition}", out)
    facts = facts_of(users)
    if json:
        return output.emit(facts)
    shown = asdict(facts)
    del shown["labels"], shown["class_names"]
    if not facts.dropped:
        del shown["dropped"]
    output.show_fields(shown)
    for line in _histogram(facts):
        output.say(line)
    return None


@data_app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="The folder that holds data sets, one of them, or your own files.")],
    json: output.Json = False,
) -> None:
    """Check the files of data sets.

    Their names, their layout, and the numbers of users and examples: a line for each finding. A note is of other bytes
    than those that the studies read, or of a folder that is no data set. Exit code 1 says that something is wrong.
    """
    from simulator.datasets import check_folder

    findings = check_folder(folder)
    if json:
        output.emit(findings)
    else:
        output.show_table(("data set", "finding", "what"), [(one.dataset, one.status, one.what) for one in findings])
    if any(one.status == "wrong" for one in findings):
        raise typer.Exit(1)


def _source(name: str) -> dict[str, object]:
    """Where a data set on disk comes from, and where it belongs."""
    from simulator.datasets import folder_of
    from simulator.datasets.bundled import SOURCES

    folder = folder_of(name)
    source = SOURCES[folder]
    files = " or ".join(" and ".join(names) for names in source.files)
    return {
        "data set": name,
        "source": source.origin,
        "licence": source.licence,
        "files": files,
        "put them in": f"DIR/{folder}/, and name DIR with --data DIR",
        "then": f"muster data check DIR/{folder}",
    }


def _listed(name: str, dataset: Dataset) -> dict[str, object]:
    from simulator.datasets import folder_of
    from simulator.datasets.bundled import SOURCES

    source = SOURCES.get(folder_of(name))
    return {
        "name": name,
        "clients": dataset.clients,
        "on_disk": dataset.on_disk,
        "about": dataset.about,
        "source": source and source.origin,
        "licence": source and source.licence,
    }


def _histogram(facts: PopulationFacts) -> list[str]:
    """Lines with a bar for each of the most frequent classes, in the order of their numbers."""
    if not facts.labels:
        return []
    ranked = sorted(range(len(facts.labels)), key=lambda label: -facts.labels[label])
    largest, rest = facts.labels[ranked[0]], ranked[SHOWN:]
    width = len(str(len(facts.labels) - 1)), len(f"{largest:,}")
    lines = ["", "label".rjust(width[0]) + "  how often"]
    for label in sorted(ranked[:SHOWN]):
        count = facts.labels[label]
        bar = "█" * round(BAR * count / max(largest, 1))
        name = f"  {facts.class_names[label]}" if facts.class_names else ""
        lines.append(f"{label:>{max(width[0], 5)}}  {count:>{width[1]},}  {bar}{name}".rstrip())
    if rest:
        lines.append(f"and {len(rest):,} more, {facts.labels[rest[-1]]:,} to {facts.labels[rest[0]]:,} times each")
    return lines


def _draw(users: Population, title: str, path: Path) -> None:
    from muster.pictures import FORMATS, draw_label_mix
    from simulator.datasets import label_counts
    from simulator.errors import DatasetError

    if path.suffix not in FORMATS:
        raise typer.BadParameter(f"{path} must end in {' or '.join(FORMATS)}", param_hint="--out")
    counts = label_counts(users)
    if counts is None:
        raise DatasetError(f"{title} has no classes to draw: `y` holds no integers")
    draw_label_mix(counts, title).save(path)


def new(
    folder: Annotated[
        Path, typer.Argument(metavar="NAME", help="The folder to make; its last part names the Python package in it.")
    ],
    json: output.Json = False,
) -> None:
    """Make a project that runs at once, for you to change.

    It has a model, users, an algorithm, their tests and a simulation.

    \b
      muster new keyboard
      cd keyboard
      muster simulate simulation.toml
    """
    paths = make_project(folder)
    if json:
        return output.emit({"folder": str(folder), "files": [str(path) for path in paths]})
    for path in paths:
        output.say(str(path))
    output.say_next("train it", ["cd", folder])
    return output.remark("  muster simulate simulation.toml")


# `muster demo`: export, coordinator, devices and replay on one machine.


ROUNDS, DEVICES = 25, 20
ACROSS, WIDTH = 5, 15
"""Digits in a line of output, and the width of each."""
ROUNDS_AT_PAGE, AT_PAGE = 3, 16
MASKED = (
    "What the coordinator saw: who took part and when, public keys, sealed shares, reports under masks that look "
    "random, and of every round the sum. It saw no report, weight or loss of a single device. An enrolment authority, "
    "a process of its own, said who is a device (docs/threat-model.md). --plain turns masking off."
)
OUT = (
    "A new folder that keeps a run of each algorithm, as `muster simulate --out` does, with its plan and model. The "
    "picture goes there too, and to the working folder without it."
)
PICTURE, TITLE = Path("learning-curves.svg"), "Handwritten digits, non-IID devices"
BROWSER = (
    "Devices on Node, and a web page in a real Chromium with a phone's screen, on which digits are drawn: --devices in "
    f"all, by default {AT_PAGE}, and --rounds secure rounds, by default {ROUNDS_AT_PAGE}, with the first algorithm. "
    "page.png, in the folder of --out, shows the page."
)
RUNTIME = "What trains: devices in Python, each a process, or in Kotlin (jvm), all in one process; `make android`."
IN_CLEAR = "What the coordinator saw: every report in the clear, with its weight and its loss. It kept only their sums."


def demo(
    algorithms: Annotated[
        str, typer.Option(help="Which to run, by commas; your own as package.module:Class or file.py:Class.")
    ] = "mimelite,fedadam",
    rounds: Annotated[int | None, typer.Option(min=1, help=f"Rounds per algorithm.  [default: {ROUNDS}]")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, max=60, help=f"Devices per round, of 60.  [default: {DEVICES}]")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=OUT)] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, and of the order of examples.")] = 0,
    plain: Annotated[
        bool, typer.Option("--plain", help="Without secure aggregation: the coordinator sees every report.")
    ] = False,
    browser: Annotated[bool, typer.Option("--browser", help=BROWSER)] = False,
    runtime: Annotated[Literal["python", "jvm"], typer.Option(help=RUNTIME)] = "python",
    json: output.Json = False,
) -> None:
    """Train a digit recogniser on 60 emulated devices.

    They speak HTTP to a real coordinator. Real handwritten digits are split non-IID over 60 devices and 15 held-out
    users. For each algorithm: export the plan, run the rounds with a process for every session that is open, measure
    accuracy on the held-out users, and replay the first rounds in the vectorised engine, which must reach the same
    model ("agreement", relative). With 8 devices or more, reports are summed under secure aggregation, whose rounding
    limits the agreement. Then the devices of the held-out users evaluate the best model, it is released to all devices,
    and one of them reads ten digits with it.
    """
    if browser and runtime != "python":
        raise typer.BadParameter("beside the page are devices on Node; leave this out", param_hint="--runtime")
    if browser:
        _in_a_browser(algorithms.partition(",")[0], rounds, devices, seed, out, plain=plain, json=json)
        return
    rounds, devices = rounds or ROUNDS, devices or DEVICES
    from fedcore.algorithms import create, module_of
    from secagg.parameters import LEAST_COHORT

    # Wrong options are reported before torch is loaded, which takes seconds.
    names = tuple(dict.fromkeys(name.strip() for name in algorithms.split(",")))
    for name in names:
        create(name, None, [module_of(name)])
    secure = devices >= LEAST_COHORT and not plain
    result = _trained(names, rounds, devices, seed, secure=secure, out=out, runtime=runtime)
    from muster.pictures import draw_measured

    picture = (out or Path()) / PICTURE
    draw_measured({run.algorithm: run.points for run in result.algorithms}, TITLE).save(picture)
    if json:
        output.emit(_summary(result, picture) | {"secure_aggregation": secure})
    else:
        _show(result, picture)
        output.remark(MASKED if secure else IN_CLEAR)


def _in_a_browser(
    algorithm: str, rounds: int | None, devices: int | None, seed: int, out: Path | None, *, plain: bool, json: bool
) -> None:
    """Train with a page and devices on Node, keep a picture of the page, and show what came of it."""
    from secagg.parameters import LEAST_COHORT

    at_page = devices or AT_PAGE
    if plain or at_page < LEAST_COHORT:
        raise typer.BadParameter(
            f"its rounds are secure, with {LEAST_COHORT} devices or more, and without --plain", param_hint="--browser"
        )
    folder = out or Path()
    folder.mkdir(parents=True, exist_ok=True)
    with output.loading():
        from muster.local.browser_demo import run_browser_demo
    result = run_browser_demo(algorithm, rounds or ROUNDS_AT_PAGE, at_page - 1, seed, folder / "page.png")
    if json:
        output.emit(dataclasses.asdict(result))
        return
    columns = ("rounds", "devices on Node", "rounds with the page's report", "accuracy, unseen users")
    output.show_table(columns, [(result.rounds, result.devices, result.counted, f"{result.test_accuracy:.3f}")])
    output.remark(f"the page said: {result.page}")
    output.remark(f"a picture of the page: {result.picture}")


def _trained(names: tuple[str, ...], rounds: int, devices: int, seed: int, **how: Any) -> DemoResult:
    """Run all algorithms, and show how far they are. how: of `trained`."""
    from muster.python.operating import trained

    with ExitStack() as stack:

        def begin() -> OnProgress:
            """The libraries are loaded: show a line for each algorithm."""
            bar = stack.enter_context(output.progress())
            lines = {name: bar.add_task(name, total=rounds, note="") for name in names}
            return lambda name, number, note: bar.update(lines[name], completed=number, note=note)

        return trained(names, rounds, devices, seed, loading=output.loading, begin=begin, **how)


def _summary(result: DemoResult, picture: Path) -> dict[str, object]:
    return {
        "algorithms": {run.algorithm: dataclasses.asdict(run) for run in result.algorithms},
        "app": dataclasses.asdict(result.app),
        "round_steps": result.round_steps,
        "agreement": max(run.agreement for run in result.algorithms),
        "learning_curves": str(picture),
    }


def _size(report: ReportBytes) -> str:
    sent, uncompressed = (f"{size / 1e3:.1f}" for size in (report.sent, report.uncompressed))
    return f"{sent} kB" if sent == uncompressed else f"{sent} kB, {uncompressed} in float32"


def _show(result: DemoResult, picture: Path) -> None:
    columns = ("algorithm", "rounds", "accuracy", "report", "up", "down", "seconds", "agreement")
    rows = [
        (
            run.algorithm,
            run.rounds,
            f"{run.test_accuracy:.3f}",
            _size(run.report),
            f"{run.bytes_up_per_device / 1e6:.2f} MB",
            f"{run.bytes_down_per_device / 1e6:.2f} MB",
            f"{run.seconds:.1f}",
            f"{run.agreement:.1e}",
        )
        for run in result.algorithms
    ]
    output.show_table(columns, rows)
    _show_app(result.app)
    output.remark(f"learning curves: {picture}")


def _show_app(app: AppResult) -> None:
    """What held-out devices measured, and what one of them read."""
    from muster.pictures import drawn_in_characters

    output.say()
    interval = f"95 %: {app.low:.3f} to {app.high:.3f}"
    output.say(f"{app.algorithm} on {app.devices} held-out devices: accuracy {app.accuracy:.3f} ({interval})")
    output.say(f"Released to all as {app.name}, version {app.version}. One of these devices reads with it:")
    for start in range(0, len(app.digits), ACROSS):
        row = app.digits[start : start + ACROSS]
        output.say()
        for line in zip(*(drawn_in_characters(one.levels) for one in row), strict=True):
            output.say(_across(line))
        output.say(_across([f"a {one.read}" + (f", is {one.digit}" if one.read != one.digit else "") for one in row]))


def _across(cells: Sequence[str]) -> str:
    return "".join(cell.ljust(WIDTH) for cell in cells).rstrip()
