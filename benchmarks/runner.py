"""The runner: makes a command of a benchmark, with its options, progress, a table for people, and JSON.

A benchmark is a module with a function `run(options, say)`: `options` is its dataclass of `benchmarks.options`,
`say` shows progress, and the result is a mapping of figures. The runner adds the header. Two names of figures have a
meaning here: `targets` holds bounds of figures by name, and `sound` decides the exit code. A list of mappings is
shown as a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import msgspec
import typer

from benchmarks.options import BENCHMARKS
from muster.header import header
from muster.options.settings import parameters_of
from muster.output import Json, doing, emit
from muster.plain import say as say_line
from muster.plain import show_table

_SHOWN = 8
"""A longer list of numbers is in the JSON only."""


def add_to(app: typer.Typer) -> None:
    """Add `bench`, with a command for each benchmark, to an application."""
    group = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Run one benchmark. Each compares with a peer in the same run; --json prints one line to keep.",
    )
    for name, options in BENCHMARKS.items():
        group.command(name)(command_of(name, options))
    app.add_typer(group, name="bench")


def command_of(name: str, options: type) -> Callable[..., None]:
    """The command that runs the benchmark `name`. Its exit code is 1 when the result says that it is not sound."""

    def command(*, json: bool, **values: Any) -> None:
        """Run the benchmark, and show or print its figures."""
        benchmark = import_module(f"benchmarks.{name}")
        with doing(name) as say:
            figures = msgspec.to_builtins(benchmark.run(options(**values), say), str_keys=True)
        if json:
            emit(header(name) | figures)
        else:
            show(figures)
        raise typer.Exit(0 if figures.get("sound", True) else 1)

    command.__doc__ = options.__doc__
    command.__signature__ = inspect.Signature([*parameters_of(options), _JSON])  # type: ignore[attr-defined]
    return command


_JSON = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)


def show(figures: Mapping[str, Any]) -> None:
    """Print figures for people: single values one a line, with their targets, and each list of records as a table."""
    targets = figures.get("targets", {})
    single, tables = [], []
    for name, value in _flat({name: value for name, value in figures.items() if name != "targets"}):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            tables.append(value)
        elif _fits(value):
            single.append((name, value, targets.get(name)))
    if single:
        columns = ("figure", "value", "target") if targets else ("figure", "value")
        show_table(columns, [row[: len(columns)] for row in single])
    for records in tables:
        columns = tuple(name for name, value in records[0].items() if _fits(value))
        say_line("")
        show_table(columns, [[record[name] for name in columns] for record in records])


def _flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values; a mapping that does not fit in a cell gives `name.name` for each of its parts."""
    for name, value in figures.items():
        if isinstance(value, dict) and not _fits(value):
            yield from ((f"{name}.{part}", inner) for part, inner in value.items())
        else:
            yield name, value


def _fits(value: object) -> bool:
    """Whether a cell can show a value: a single one, a short list or a mapping of single ones."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    short = isinstance(value, dict) or len(parts) <= _SHOWN
    return short and not any(isinstance(part, dict | list | tuple) for part in parts)
