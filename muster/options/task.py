"""Options of `muster task create` and `release`: a task's settings, and its release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.rules.task_settings import TaskSettings
from muster.options.settings import with_settings

ReleaseKey = Annotated[
    Path | None,
    typer.Option(
        metavar="KEYFILE", help="With --secagg: the private key that releases the plan, from `muster key new`."
    ),
]
ReleaseCounter = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --secagg: a device refuses a counter below the last that it saw of the key.",
    ),
]
ReleaseDays = Annotated[int, typer.Option(min=1, max=3650, help="With --secagg: days that the release is good for.")]

with_task_settings = with_settings(TaskSettings, spread=("budget", "secagg", "clear", "buffered"))
"""Have a command take the settings of a task as options; its parameter `settings` gets those given, as a mapping."""
