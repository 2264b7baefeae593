"""`muster bench`: one benchmark, against a peer in the same run."""

from __future__ import annotations

from typing import Annotated

import typer

from muster.output import Json, emit, progress, show_table

bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run one benchmark. Each compares with a peer in the same run; --json prints one line to keep.",
)


@bench_app.callback()
def bench() -> None:
    """Make a command group of what has one command so far."""


@bench_app.command("device_step")
def device_step(
    models: Annotated[
        list[str] | None, typer.Option("--model", help="A built-in model; may be repeated.  [default: all]")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="onnx or executorch; may be repeated.  [default: both]"),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Turns of each runtime; the least time counts.")] = 10,
    json: Json = False,
) -> None:
    """One local step (forward, backward, update) on ONNX Runtime and ExecuTorch against torch eager, on one thread.

    CPU milliseconds at batch 20, and their ratio to torch's. All models in both formats take several minutes, of which
    most goes into exporting.
    """
    from export.formats import FORMATS
    from export.models import MODELS
    from muster.bench.device_step import run

    chosen = list(models or MODELS)
    with progress() as bar:
        task = bar.add_task("device_step", total=None, note="")
        result = run(chosen, list(formats or FORMATS), blocks, lambda doing: bar.update(task, note=doing))
    if json:
        emit(result)
        return
    rows = [
        (
            step.model,
            step.backend,
            f"{step.cpu_ms:.3g}",
            f"{step.ratio_to_eager:.2f}",
            step.target,
            None if step.export_cpu_s is None else f"{step.export_cpu_s:.1f}",
        )
        for step in result.steps
    ]
    show_table(("model", "runtime", "CPU ms", "to torch", "target", "export CPU s"), rows)


@bench_app.command("device_footprint")
def device_footprint(json: Json = False) -> None:
    """What a device weighs: megabytes installed, CPU seconds to import, memory while it trains.

    It installs the device extra into an empty folder, so it needs pip and PyPI, and takes half a minute.
    """
    from muster.bench.device_footprint import run

    with progress() as bar:
        task = bar.add_task("device_footprint", total=None, note="")
        result = run(lambda doing: bar.update(task, note=doing))
    if json:
        return emit(result)
    figures = {
        "installed_mb": result.installed_mb,
        "bytecode_mb": result.bytecode_mb,
        "import_cpu_s": result.import_cpu_s,
        "train_rss_mb": result.train_rss_mb,
        "train_rss_executorch_mb": result.train_rss_executorch_mb,
    }
    rows = [(name, f"{value:.3g}", result.targets.get(name)) for name, value in figures.items()]
    return show_table(("what", "is", "at most"), rows)
