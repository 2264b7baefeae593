"""What commands print: one JSON object or a table on standard output, progress on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one value, on standard output and nothing else there.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the algorithm; may be repeated.")
]

stdout = Console()
stderr = Console(stderr=True)


def emit(value: Any) -> None:
    """Print a value as one line of JSON."""
    typer.echo(msgspec.json.encode(value).decode())


def show_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one pair a line."""
    table = Table(show_header=False, box=None)
    for name, value in fields.items():
        table.add_row(f"[bold]{name}[/]", words(value))
    stdout.print(table)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*(words(value) for value in row))
    stdout.print(table)


def words(value: object) -> str:
    """A value for people: short floats, lists by commas, mappings as name=value of what is there, nothing as a dash."""
    if isinstance(value, Mapping):
        return ", ".join(f"{words(name)}={words(part)}" for name, part in value.items() if part is not None) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value)) or "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
    return "–" if value is None else escape(str(value))


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


def parse_settings(pairs: Sequence[str] | None) -> dict[str, object]:
    """`key=value` options as a mapping. Raises typer.BadParameter on anything else."""
    settings: dict[str, object] = {}
    for pair in pairs or ():
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"{pair!r} is not of the form key=value", param_hint="--set")
        settings[key] = value
    return settings
