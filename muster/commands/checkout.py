"""`muster bench` and `muster study`: commands of a checkout, whose code is in no wheel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import typer

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
