"""`muster data`: the data sets that there are, and what one of them holds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.options.simulate import Data
from muster.output import Json, answer, emit, say, show_fields, show_table

if TYPE_CHECKING:
    from simulator.datasets import Dataset
    from simulator.datasets.facts import PopulationFacts
    from simulator.population import Population

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


@data_app.command()
def show(
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
    from simulator.datasets.facts import facts_of

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
    from muster.pictures.label_mix import draw_label_mix
    from muster.pictures.picture import FORMATS
    from simulator.datasets.facts import label_counts
    from simulator.errors import DatasetError

    if path.suffix not in FORMATS:
        raise typer.BadParameter(f"{path} must end in {' or '.join(FORMATS)}", param_hint="--out")
    counts = label_counts(users)
    if counts is None:
        raise DatasetError(f"{title} has no classes to draw: `y` holds no integers")
    draw_label_mix(counts, title).save(path)
