"""`muster bench`: every benchmark as a command. Their code is in a checkout's folder `benchmarks`, and in no wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

_CHECKOUT = Path(__file__).parents[2]


def add_bench(app: typer.Typer, checkout: Path = _CHECKOUT) -> None:
    """Add `bench` to the application: a group of commands in a checkout; elsewhere one that says what is missing."""
    if not find_checkout(checkout):
        app.command("bench", context_settings=_ANYTHING)(_missing)
        return
    from benchmarks.options import BENCHMARKS
    from benchmarks.runner import command_of

    group = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Run one benchmark. Each compares with a peer in the same run; --json prints one line to keep.",
    )
    for name, options in BENCHMARKS.items():
        group.command(name)(command_of(name, options))
    app.add_typer(group, name="bench")


def find_checkout(checkout: Path = _CHECKOUT) -> bool:
    """Whether this is a checkout; then its folders `benchmarks` and `tools` can be imported."""
    is_checkout = all((checkout / name).is_file() for name in ("pyproject.toml", "benchmarks/options.py"))
    if is_checkout and str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    return is_checkout


_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


def _missing() -> None:
    """Run one benchmark, in a checkout of the repository."""
    raise typer.BadParameter(
        "the benchmarks are not in the installed package: clone the repository and run `make install` there"
    )
