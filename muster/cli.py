"""`muster`: every command of the stack. Imports are lazy, so each command loads only what it runs."""

from __future__ import annotations

import signal
import sys

import typer
from rich.markup import escape

from muster.commands.bench import bench_app
from muster.commands.coordinator import coordinator_app
from muster.commands.demo import demo
from muster.commands.device import device_app
from muster.commands.doctor import doctor
from muster.commands.export import export, plan_app
from muster.commands.fleet import fleet_app
from muster.commands.key import key_app
from muster.commands.simulate import simulate
from muster.commands.task import task_app
from muster.output import stderr

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
OURS = {"coordinator", "device_runtime", "export", "fedcore", "muster", "simulator"}
USAGE_ERRORS = {
    "UnknownAlgorithm",
    "InvalidSetting",
    "UnknownModel",
    "UnknownFormat",
    "DatasetError",
    "EngineError",
    "ProfileError",
    "InvalidTask",
}

# What a partial installation lacks, and the extra that brings it.
EXTRAS = {
    "torch": "export",
    "onnx": "export",
    "executorch": "executorch",
    "onnxruntime": "device",
    "httpx2": "device",
    "fastapi": "coordinator",
    "pydantic": "coordinator",
    "sqlalchemy": "coordinator",
    "uvicorn": "coordinator",
    "matplotlib": "sim",
    "sklearn": "sim",
}

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
app.add_typer(device_app, name="device")
app.add_typer(fleet_app, name="fleet")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run a command; one of our errors becomes one line on standard error and an exit code."""
    # Ended like this, a command still stops the processes that it started and removes its temporary folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        stderr.print(f"error: this command needs {error.name}: pip install 'muster-fl[{extra}]'", markup=False)
        sys.exit(EXIT_FAILED)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in OURS and not isinstance(error, OSError):
            raise
        stderr.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(EXIT_USAGE if type(error).__name__ in USAGE_ERRORS else EXIT_FAILED)
