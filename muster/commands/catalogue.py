"""`muster algorithms`, `muster data` and `muster new`: what there is to start from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.options.settings import parse_key_values
from muster.options.simulate import Data
from muster.output import Json, Settings, answer, emit, remark, say, say_next, show_fields, show_table
from muster.project import make_project

if TYPE_CHECKING:
    from fedcore.algorithms.facts import AlgorithmFacts, Size, TripFacts
    from simulator.datasets import Dataset
    from simulator.datasets.checking import PopulationFacts
    from simulator.population import Population


algorithms_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at the federated algorithms.")


@algorithms_app.command("list")
def list_algorithms(json: Json = False) -> None:
    """List every built-in algorithm, with its sizes.

    Also its family, and whether it runs on devices. Sizes are numbers of values, for a model of d parameters, with the
    default settings. A second trip follows a comma.
    """
    from fedcore.algorithms import ALGORITHMS, create
    from fedcore.algorithms.facts import facts_of

    algorithms = [facts_of(create(name)) for name in ALGORITHMS]
    if json:
        return emit(algorithms)
    columns = ("algorithm", "family", "down", "up", "server state", "trips", "cross-device", "paper")
    return show_table(columns, [_cells(facts) for facts in algorithms])


@algorithms_app.command("show")
def show_algorithm(
    name: Annotated[
        str, typer.Argument(help="An algorithm of the list, or your own as package.module:Class or file.py:Class.")
    ],
    settings: Settings = None,
    json: Json = False,
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
        return emit(facts)
    for line in (facts.summary, "", *facts.equations.splitlines(), ""):
        say(line)
    show_fields(_outline(facts))
    say()
    columns = ("setting", "value", "what it may be", "meaning")
    return show_table(
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
def list_datasets(json: Json = False) -> None:
    """List every data set that has a name.

    Also how many clients it has, where its files belong, its licence, and what it is. `muster data show NAME` says its
    source and its files.
    """
    from simulator.datasets import DATASETS, folder_of
    from simulator.datasets.sources import SOURCES

    if json:
        return emit([_listed(name, dataset) for name, dataset in DATASETS.items()])
    rows = [
        (
            *(name, dataset.clients or "its users", f"DIR/{folder_of(name)}" if dataset.on_disk else "–"),
            *(SOURCES[folder_of(name)].licence if dataset.on_disk else "–", dataset.about),
        )
        for name, dataset in DATASETS.items()
    ]
    return show_table(("data set", "clients", "on disk", "licence", "what"), rows)


@data_app.command("show")
def show_dataset(
    name: Annotated[
        str, typer.Argument(help="A data set of the list, package.module:function, file.py:function, or a path.")
    ],
    data: Data = None,
    partition: Annotated[str | None, typer.Option(help="How examples are dealt to clients, as dirichlet:0.3.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="To how many clients, or how many of the users.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture of users and classes: .svg or .png.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a data set holds: users, examples, classes.

    Sizes are percentiles over users. The histogram has the most frequent classes, or tokens. Of a data set on disk,
    without --data: its source and licence, its files, and where they belong.
    """
    from simulator import datasets
    from simulator.datasets.checking import facts_of

    if data is None and datasets.describe(name).on_disk:
        return answer(_source(name), json)
    users = datasets.load(name, data, clients, partition)
    if out is not None:
        _draw(users, name if partition is None else f"{name}, {partition}", out)
    facts = facts_of(users)
    if json:
        return emit(facts)
    shown = asdict(facts)
    del shown["labels"]
    show_fields(shown)
    for line in _histogram(facts):
        say(line)
    return None


@data_app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="The folder that holds data sets, one of them, or your own files.")],
    json: Json = False,
) -> None:
    """Check the files of data sets.

    Their names, their layout, and the numbers of users and examples: a line for each finding. A note is of other bytes
    than those that the studies read, or of a folder that is no data set. Exit code 1 says that something is wrong.
    """
    from simulator.datasets.checking import check_folder

    findings = check_folder(folder)
    if json:
        emit(findings)
    else:
        show_table(("data set", "finding", "what"), [(one.dataset, one.status, one.what) for one in findings])
    if any(one.status == "wrong" for one in findings):
        raise typer.Exit(1)


def _source(name: str) -> dict[str, object]:
    """Where a data set on disk comes from, and where it belongs."""
    from simulator.datasets import folder_of
    from simulator.datasets.sources import SOURCES

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
    from simulator.datasets.sources import SOURCES

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
        lines.append(f"{label:>{max(width[0], 5)}}  {count:>{width[1]},}  {bar}".rstrip())
    if rest:
        lines.append(f"and {len(rest):,} more, {facts.labels[rest[-1]]:,} to {facts.labels[rest[0]]:,} times each")
    return lines


def _draw(users: Population, title: str, path: Path) -> None:
    from muster.pictures.curves import FORMATS
    from muster.pictures.grids import draw_label_mix
    from simulator.datasets.checking import label_counts
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
    json: Json = False,
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
        return emit({"folder": str(folder), "files": [str(path) for path in paths]})
    for path in paths:
        say(str(path))
    say_next("train it", ["cd", folder])
    return remark("  muster simulate simulation.toml")
