"""Options of `muster task create` and `release`: a task's settings, and its release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.rules.task_settings import TaskSettings
from muster.options.settings import with_settings

_FILE = "With --secagg: its signed release."
ReleaseFile = Annotated[Path | None, typer.Option("--release", metavar="FILE", help=_FILE)]
ReleaseKey = Annotated[
    Path | None,
    typer.Option(metavar="KEYFILE", help="With --secagg: the key of its release."),
]
ReleaseCounter = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --secagg: devices refuse one below the last of the key.",
    ),
]
ReleaseDays = Annotated[int, typer.Option(min=1, max=3650, help="With --secagg: days that the release is good for.")]

_EVALUATED, _COMPARED = "Evaluate TASK, TASK@ROUND or a file.", "With a bundle of compare: the other model."
EvaluatedModel = Annotated[str | None, typer.Option("--evaluate", metavar="MODEL", help=_EVALUATED)]
ComparedModel = Annotated[str | None, typer.Option("--against", metavar="MODEL", help=_COMPARED)]
_EVERY = "Evaluate on held-out devices every N rounds."
EvaluateEvery = Annotated[int | None, typer.Option(metavar="N", help=_EVERY)]
EvaluationBundle = Annotated[Path | None, typer.Option("--evaluation", help="The bundle for --evaluate-every.")]

_LIKE = "Plan and settings of TASK, unless given."
LikeTask = Annotated[str | None, typer.Option("--like", metavar="TASK", help=_LIKE)]
_UNSET = "With --like: take the default; repeatable."
Unset = Annotated[list[str] | None, typer.Option("--unset", metavar="SETTING", help=_UNSET)]

TaskId = Annotated[str, typer.Argument(metavar="TASK", help="The task's id, from `muster task list`.")]

with_task_settings = with_settings(
    TaskSettings,
    spread=("budget", "secagg", "clear", "buffered"),
    defaults={"population": None, "goal": None, "rounds": None},
)
"""Have a command take the settings of a task as options; its parameter `settings` gets those given, as a mapping."""
