"""Every command of the stack in one application. Imports are lazy, so each command loads only what it runs."""

from __future__ import annotations

import typer

from muster.commands import device as on_device
from muster.commands.bench import bench_app
from muster.commands.coordinator import coordinator_app
from muster.commands.demo import demo
from muster.commands.doctor import doctor
from muster.commands.export import export, plan_app
from muster.commands.fleet import fleet_app
from muster.commands.key import key_app
from muster.commands.simulate import simulate
from muster.commands.task import task_app

app = typer.Typer(
    name="muster",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Cross-device federated learning: export a model, run a coordinator, run devices, simulate fleets.\n\n"
    "Start with `muster demo`. Commands that answer have --json; exit codes are 0 ok, 1 failed, 2 usage, 75 try later.",
)
app.command()(demo)
app.command()(doctor)
app.command()(export)
app.command()(simulate)
app.add_typer(plan_app, name="plan")
app.add_typer(key_app, name="key")
app.add_typer(coordinator_app, name="coordinator")
app.add_typer(task_app, name="task")
app.add_typer(fleet_app, name="fleet")
app.add_typer(bench_app, name="bench")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def device(context: typer.Context) -> None:
    """Run a device."""
    raise typer.Exit(on_device.main(context.args))
