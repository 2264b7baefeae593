"""Options of `muster task create` whose defaults are those of a task's settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

DEADLINE = "How long a round waits for reports. With --secagg, 5 × phase-s of it are for the phases after the training."
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
        help="With --secagg: a device that has seen a release of the key for the population refuses a lower counter.",
    ),
]
ReleaseDays = Annotated[
    int, typer.Option(min=1, max=3650, help="With --secagg: days after which devices refuse the release.")
]


class Default:
    """The default of a setting, read when it is asked for: to list the commands must load nothing heavy.

    part: the part of TaskSettings that has it, if it is not TaskSettings itself.
    """

    def __init__(self, name: str, part: str = "TaskSettings") -> None:
        self._name, self._part = name, part

    def __call__(self) -> Any:
        """The value."""
        from coordinator.rules import task_settings

        fields = dataclasses.fields(getattr(task_settings, self._part))
        return next(field.default for field in fields if field.name == self._name)

    def __str__(self) -> str:
        found = self()
        return ", ".join(found) if isinstance(found, tuple) else str(found)


def setting(name: str, about: str) -> Any:
    """An option for a field of TaskSettings, with its default."""
    return typer.Option(help=about, default_factory=Default(name))


def secagg_setting(name: str, about: str) -> Any:
    """An option for a field of Secagg, with its default."""
    return typer.Option(help=f"With --secagg: {about}", default_factory=Default(name, "Secagg"))


def clear_setting(name: str, about: str) -> Any:
    """An option for a field of ClearReports, with its default."""
    return typer.Option(help=f"Without --secagg: {about}", default_factory=Default(name, "ClearReports"))
