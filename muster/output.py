"""What commands print: one JSON object or a table on standard output, progress on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from muster.plain import emit, words

__all__ = ["Json", "Settings", "emit", "parse_settings", "progress", "show_fields", "show_table", "stderr", "stdout"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one value, on standard output and nothing else there.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the algorithm; may be repeated.")
]

stdout = Console()
stderr = Console(stderr=True)


def show_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one pair a line."""
    table = Table(show_header=False, box=None)
    for name, value in fields.items():
        table.add_row(f"[bold]{name}[/]", escape(words(value)))
    stdout.print(table)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*(escape(words(value)) for value in row))
    stdout.print(table)


def progress() -> Progress:
    """A progress bar on standard error; silent when that is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=stderr, disable=not stderr.is_terminal)


class Say(Protocol):
    """Tells what is being done now, and how many more of the things that are counted are done."""

    def __call__(self, note: str, done: int = 0) -> None: ...


@contextmanager
def doing(what: str) -> Iterator[Say]:
    """A progress bar for work of unknown length."""
    with progress() as bar:
        task = bar.add_task(what, total=None, note="")
        yield lambda note, done=0: bar.update(task, note=note, advance=done)


def parse_settings(pairs: Sequence[str] | None) -> dict[str, object]:
    """`key=value` options as a mapping. Raises typer.BadParameter on anything else."""
    settings: dict[str, object] = {}
    for pair in pairs or ():
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"{pair!r} is not of the form key=value", param_hint="--set")
        settings[key] = value
    return settings
