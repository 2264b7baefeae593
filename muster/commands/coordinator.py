"""`muster coordinator`: the service."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from muster.output import Json, emit, show_fields

coordinator_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run the coordinator.")


@coordinator_app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings; flags and environment win.")] = None,
    db: Annotated[
        str | None, typer.Option(help="sqlite:///PATH or postgresql://….  [default: sqlite:///muster.db]")
    ] = None,
    blobs: Annotated[Path | None, typer.Option(help="Folder of plans and models.  [default: muster-blobs]")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.  [default: 8080]")] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the service's URL here once it accepts devices.")
    ] = None,
) -> None:
    """Serve devices until SIGTERM or Ctrl-C; a restart takes up every task where it was committed last.

    Every setting may also come from the environment, as MUSTER_DATABASE, MUSTER_BLOBS, MUSTER_PORT and so on.
    """
    from pydantic import ValidationError

    from coordinator.app import serve as run
    from coordinator.settings import Settings

    if config is not None:
        os.environ["MUSTER_CONFIG"] = str(config)
    given: dict[str, Any] = {"database": db, "blobs": blobs, "host": host, "port": port}
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except (ValidationError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error), param_hint="settings") from error

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def on_ready(url: str) -> None:
        typer.echo(f"coordinator ready at {url}", err=True)
        if ready_file is not None:
            partial = ready_file.with_suffix(".partial")
            partial.write_text(url)
            partial.replace(ready_file)

    # The server handles SIGTERM itself and raises it again when it has stopped: that is a good end, not a failure.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(KeyboardInterrupt):
        run(settings, on_ready)


@coordinator_app.command()
def migrate(
    db: Annotated[
        str, typer.Option("--db", envvar="MUSTER_DATABASE", help="The database to change.")
    ] = "sqlite:///muster.db",
    to: Annotated[
        str | None, typer.Option(help="Revision to go to, up or down; base drops all.  [default: this version's]")
    ] = None,
    json: Json = False,
) -> None:
    """Bring an existing database to the tables that this version works with.

    Stop every coordinator on it and make a backup first. Going down loses what is in the tables and columns that go.
    """
    from dataclasses import asdict

    from coordinator.store import migrations

    done = asdict(migrations.migrate(db, to or migrations.HEAD))
    if json:
        emit(done)
    else:
        show_fields(done)
