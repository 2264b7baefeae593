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

_SOURCE = "TASK|TASK@ROUND|FILE"
_EVALUATED = "Evaluate this model: that of a task, by default after its last round, or a file's."
EvaluatedModel = Annotated[str | None, typer.Option("--evaluate", metavar=_SOURCE, help=_EVALUATED)]
ComparedModel = Annotated[
    str | None,
    typer.Option("--against", metavar=_SOURCE, help="With --evaluate, and a bundle of compare: the other model."),
]

with_task_settings = with_settings(
    TaskSettings, spread=("budget", "secagg", "clear", "buffered"), defaults={"rounds": None}
)
"""Have a command take the settings of a task as options; its parameter `settings` gets those given, as a mapping."""
