"""Stores of a coordinator that commands work on: their common options, and the opening of one, here or over HTTP."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    typer.Option(help="File with the head that the log had at the last time; it is compared, then written anew."),
]


def given_again(*, db: str | None = None, blobs: str | None = None, coordinator: str | None = None) -> list[str]:
    """The options that were given, as they are typed, for the commands that come next; passwords are left out."""
    from coordinator.store.database_engines import printable
    from muster.remote import shown

    said = {
        "db": None if db is None else printable(db),
        "blobs": blobs,
        "coordinator": None if coordinator is None else shown(coordinator),
    }
    return [word for name, value in said.items() if value is not None for word in (f"--{name}", value)]


def located(db: str | None, blobs: str | None = None, **more: object) -> Settings:
    """The coordinator's settings, from where it takes them itself: what is given here, MUSTER_…, the settings file."""
    from coordinator.settings import load_settings

    given = {"database": db, "blobs": blobs, **more}
    return load_settings({name: value for name, value in given.items() if value is not None})


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
