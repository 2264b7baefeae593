"""`muster data`: the data sets that there are, and what one of them holds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.options.simulate import Data
from muster.output import Json, emit, say, show_fields, show_table

if TYPE_CHECKING:
    from simulator.datasets import Dataset
    from simulator.datasets.facts import PopulationFacts
    from simulator.population import Population

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at data sets.")

SHOWN, BAR = 20, 40
"""Classes of a histogram, and the characters of its longest bar."""


@data_app.command("list")
def list_datasets(json: Json = False) -> None:
    """List every data set that has a name.

    Also how many clients it has, where it comes from, and what it is.
    """
    from simulator.datasets import DATASETS

    if json:
        return emit([{"name": name, **_listed(dataset)} for name, dataset in DATASETS.items()])
    rows = [
        (name, dataset.clients or "its users", f"DIR/{name}" if dataset.on_disk else "–", dataset.about)
        for name, dataset in DATASETS.items()
    ]
    return show_table(("data set", "clients", "on disk", "what"), rows)


@data_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A data set of the list, package.module:function, or a path.")],
    data: Data = None,
    partition: Annotated[str | None, typer.Option(help="How examples are dealt to clients, as dirichlet:0.3.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="To how many clients, or how many of the users.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture of users and classes: .svg or .png.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a data set holds: users, examples, classes.

    Sizes are percentiles over users. The histogram has the most frequent classes, or tokens.
    """
    from simulator import datasets
    from simulator.datasets.facts import facts_of

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


def _listed(dataset: Dataset) -> dict[str, object]:
    return {"clients": dataset.clients, "on_disk": dataset.on_disk, "about": dataset.about}


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
