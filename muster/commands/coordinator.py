"""`muster coordinator`: the service."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.output import Json, emit, show_table

if TYPE_CHECKING:
    from coordinator.server import Addresses

coordinator_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run the coordinator.")
Config = Annotated[Path | None, typer.Option(help="A TOML file of settings; flags and environment win.")]
Db = Annotated[str | None, typer.Option(help="SQLite file.  [default: sqlite:///muster.db]")]


@coordinator_app.command()
def serve(
    config: Config = None,
    db: Db = None,
    blobs: Annotated[Path | None, typer.Option(help="Folder of plans and models.  [default: muster-blobs]")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.  [default: 8080]")] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the service's URL here once it accepts devices.")
    ] = None,
) -> None:
    """Serve devices until SIGTERM or Ctrl-C; a restart takes up every task where it was committed last.

    Operators are served on a port of their own, 127.0.0.1:8081 unless set otherwise. Every setting may also come from
    the environment, as MUSTER_DATABASE, MUSTER_ADMIN_PORT and so on: `muster coordinator config` lists them all.
    """
    from coordinator.logs import configure_logs
    from coordinator.server import serve as run
    from coordinator.settings import load_settings

    settings = load_settings(_given(config, database=db, blobs=blobs, host=host, port=port))
    configure_logs(settings.log_level, settings.log_format)

    def on_ready(addresses: Addresses) -> None:
        typer.echo(f"coordinator ready at {addresses.devices}", err=True)
        if ready_file is not None:
            partial = ready_file.with_suffix(".partial")
            partial.write_text(addresses.devices)
            partial.replace(ready_file)

    # The server handles SIGTERM itself and raises it again when it has stopped: that is a good end, not a failure.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(KeyboardInterrupt):
        run(settings, on_ready)


@coordinator_app.command("config")
def show_config(config: Config = None, json: Json = False) -> None:
    """Show every setting as `serve` would have it, without passwords, and where it comes from.

    An unknown setting or a wrong value is named, and the exit code is 2.
    """
    from coordinator.settings import effective, load_settings

    given = _given(config)
    found = effective(load_settings(given), given)
    if json:
        emit({one.name: {"value": one.value, "source": one.source} for one in found})
    else:
        show_table(("setting", "value", "source"), [(one.name, one.value, one.source) for one in found])


def _given(config: Path | None, **options: Any) -> dict[str, Any]:
    """The options that were given; the file of settings is named in the environment, where the settings look."""
    if config is not None:
        os.environ["MUSTER_CONFIG"] = str(config)
    return {name: value for name, value in options.items() if value is not None}
