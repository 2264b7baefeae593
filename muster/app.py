"""The application of all commands. Imports are lazy, so each command loads only what it runs."""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import Annotated

import typer

from muster.commands import device as on_device
from muster.commands.administration import audit_app, doctor, key_app, log
from muster.commands.ask import ask
from muster.commands.catalogue import algorithms_app, data_app, demo, new
from muster.commands.coordinator import authority_app, coordinator_app
from muster.commands.export import export, plan_app
from muster.commands.fleet import add_checkout, fleet_app, forecast
from muster.commands.model import model_app
from muster.commands.privacy import privacy_app
from muster.commands.simulate import plot, simulate, sweep
from muster.commands.task import task_app
from muster.options import CommandWithSet
from muster.plain import say


def _show_version(asked: bool) -> None:
    if asked:
        say(f"muster {installed('muster-fl')}")
        raise typer.Exit


app = typer.Typer(
    name="muster",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def muster(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Cross-device federated learning: export a model, run a coordinator, run devices, simulate fleets.

    Start with `muster demo`. Commands that answer have --json; exit codes are 0 ok, 1 failed, 2 usage, 75 try later.
    """


app.command()(demo)
app.command()(ask)
app.command()(doctor)
app.command()(new)
app.command(cls=CommandWithSet)(export)
app.command(cls=CommandWithSet)(simulate)
app.command()(forecast)
app.command()(sweep)
app.command()(plot)
plan_app.command()(log)
app.add_typer(algorithms_app, name="algorithms")
app.add_typer(data_app, name="data")
app.add_typer(plan_app, name="plan")
app.add_typer(model_app, name="model")
app.add_typer(key_app, name="key")
app.add_typer(authority_app, name="authority")
app.add_typer(coordinator_app, name="coordinator")
app.add_typer(task_app, name="task")
app.add_typer(audit_app, name="audit")
app.add_typer(privacy_app, name="privacy")
app.add_typer(fleet_app, name="fleet")
add_checkout(app)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def device(context: typer.Context) -> None:
    """Run a device."""
    raise typer.Exit(on_device.main(context.args))
