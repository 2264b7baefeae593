"""`muster new`: a new project, which runs at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster.output import Json, emit, remark, say, say_next
from muster.project import make_project


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
