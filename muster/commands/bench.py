"""`muster bench`: every benchmark as a command."""

from __future__ import annotations

import typer

from muster.bench.options import BENCHMARKS
from muster.bench.runner import command_of

bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run one benchmark. Each compares with a peer in the same run; --json prints one line to keep.",
)
for _name, _options in BENCHMARKS.items():
    bench_app.command(_name)(command_of(_name, _options))
