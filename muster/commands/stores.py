"""Stores of a coordinator that commands work on: their common options, and the opening of one, here or over HTTP."""

from __future__ import annotations

import functools
import inspect
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.options import Command, with_parameters

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.settings import Settings

Database = Annotated[
    str | None, typer.Option("--db", help="The coordinator's database.  [default: as its settings say]")
]
Blobs = Annotated[
    str | None,
    typer.Option(
        "--blobs",
        help="The coordinator's blobs: a folder, s3://…, gs://… or az://…  [default: as its settings say]",
    ),
]
Remote = Annotated[
    str | None,
    typer.Option(
        envvar="MUSTER_COORDINATOR",
        help="URL of a coordinator's port for operators, instead of --db and --blobs; the token is in MUSTER_TOKEN.",
    ),
]

HeadFile = Annotated[
    Path | None,
    typer.Option(help="File with the log's head at the last check; compared, then written anew."),
]


def given_again(*, db: str | None = None, blobs: str | None = None, coordinator: str | None = None) -> list[str]:
    """These options as they are typed, for the next commands; passwords are left out."""
    from coordinator.store.database import printable
    from muster.remote import shown

    options = {
        "db": None if db is None else printable(db),
        "blobs": blobs,
        "coordinator": None if coordinator is None else shown(coordinator),
    }
    return [word for name, value in options.items() if value is not None for word in (f"--{name}", value)]


def located(db: str | None, blobs: str | None = None, **more: object) -> Settings:
    """The coordinator's settings, read as it reads them: from these, then MUSTER_…, then its settings file."""
    from coordinator.settings import load_settings

    settings = {"database": db, "blobs": blobs, **more}
    return load_settings({name: value for name, value in settings.items() if value is not None})


def open_store(db: str | None, blobs: str | None, coordinator: str | None) -> AbstractContextManager[TaskStore]:
    """The coordinator's own store, or what its admin API makes of it for the holder of MUSTER_TOKEN."""
    if coordinator is not None:
        from muster.remote import RemoteStore

        return RemoteStore(coordinator, os.environ.get("MUSTER_TOKEN"))
    from coordinator.keys import open_lineage
    from coordinator.store.tasks import open_coordinator_store

    settings = located(db, blobs)
    store = open_coordinator_store(
        settings.database, settings.blobs, create=False, algorithm_modules=settings.algorithm_modules
    )
    store.lineage_key = lambda: open_lineage(settings.keys_file, store.database)
    return store


def with_store(act: Command) -> Command:
    """Have a command of keyword parameters take --db, --blobs and --coordinator.

    Its parameter `store` gets the store that they name, open until the command ends.
    """

    @functools.wraps(act)
    def opened(**arguments: Any) -> None:
        with arguments.pop("store") as store:
            act(store=store, **arguments)

    # The type of the store is not loaded at the start of a command.
    opened.__annotations__ = {name: hint for name, hint in act.__annotations__.items() if name != "store"}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in {"db": Database, "blobs": Blobs, "coordinator": Remote}.items()
    ]
    return with_parameters("store", options, lambda where: open_store(**where))(opened)
