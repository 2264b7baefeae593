"""The choice of an engine for a training: as asked, or the one that a calibration expects to be done first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from export.errors import ExportError
from fedcore.algorithms.algorithm import Algorithm, keeps_client_state
from fedcore.decoding import decoder
from simulator.engines.calibration import Figures, GraphFigures, Notes, Task, seconds_per_step
from simulator.engines.computing import Computing
from simulator.engines.forked import compute_apart
from simulator.errors import EngineError, ProcessDied

if TYPE_CHECKING:
    from simulator.engines.graphs import TimedExport  # needs ONNX Runtime

T = TypeVar("T")
Wanted = Literal["auto", "graphs", "torch"]
# A training that torch ends within so many CPU seconds is not worth an export, which takes some of them.
PATIENCE_S = 20.0

_SECONDS = decoder(list[float])


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine for a training. reason: why that, as a clause."""

    computing: Computing
    reason: str


def choose(wanted: Wanted, task: Task, torch_alone: Computing) -> Choice:
    """The engine that is wanted; with "auto" the one that is expected to need less CPU time, its start included.

    torch_alone: device and processes, without graphs. Where processes are to be forked, no gradient is computed in this
    one. Raises EngineError or ExportError when the engine `graphs` is wanted and cannot run the task.
    """
    if wanted == "torch":
        return Choice(torch_alone, "as asked")
    obstacle = _obstacle(task.algorithm, torch_alone.device)
    if wanted == "auto":
        return Choice(torch_alone, obstacle) if obstacle else _calibrated(task, torch_alone)
    if obstacle:
        raise EngineError(f"the engine graphs cannot run this: {obstacle}; take the engine torch")
    return Choice(replace(torch_alone, graphs=_export(task, torch_alone).graphs), "as asked")


def _obstacle(algorithm: Algorithm, device: str) -> str:
    """What keeps graphs from running, if anything."""
    if keeps_client_state(algorithm):
        return f"{algorithm.name} keeps vectors on clients, and graphs run only what devices run"
    if device != "cpu":
        return f"graphs run on the CPU, not on {device}"
    missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    return f"{' and '.join(missing)} is not installed: pip install 'muster-fl[export]'" if missing else ""


def _calibrated(task: Task, torch_alone: Computing) -> Choice:
    notes = Notes(task)
    figures = notes.read() or Figures(_step_s(task, torch_alone)[0])
    notes.write(figures)
    work_s = task.steps * figures.torch_s
    if work_s < PATIENCE_S:
        return Choice(torch_alone, f"about {work_s:.1g} CPU s of steps are too few to export graphs for")
    if figures.of_graphs is not None and not _pays(task, figures.torch_s, figures.of_graphs):
        return Choice(torch_alone, _compared(figures.torch_s, figures.of_graphs))
    try:
        export = _export(task, torch_alone)
        on_graphs = replace(torch_alone, graphs=export.graphs)
        torch_s, of_graphs = figures.torch_s, figures.of_graphs
        if of_graphs is None:
            torch_s, graphs_s = _step_s(task, torch_alone, on_graphs)
            of_graphs = GraphFigures(graphs_s, export.cpu_s)
    except (ExportError, EngineError, ProcessDied) as error:
        return Choice(torch_alone, f"there are no graphs of this model: {error}")
    notes.write(Figures(torch_s, of_graphs))
    return Choice(on_graphs if _pays(task, torch_s, of_graphs) else torch_alone, _compared(torch_s, of_graphs))


def _pays(task: Task, torch_s: float, of_graphs: GraphFigures) -> bool:
    return of_graphs.export_s + task.steps * of_graphs.step_s < task.steps * torch_s


def _compared(torch_s: float, of_graphs: GraphFigures) -> str:
    return (
        f"a client's step takes {1e3 * of_graphs.step_s:.3g} CPU ms on graphs, which take {of_graphs.export_s:.2g} s "
        f"to export, and {1e3 * torch_s:.3g} with torch"
    )


def _step_s(task: Task, *computings: Computing) -> list[float]:
    return _computed(functools.partial(seconds_per_step, task, *computings), _SECONDS, apart=computings[0].forks)


def _export(task: Task, torch_alone: Computing) -> TimedExport:
    from simulator.engines.graphs import TIMED_EXPORT, timed_export  # noqa: PLC0415  # needs ONNX Runtime

    export = functools.partial(timed_export, task.model, task.algorithm)
    return _computed(export, TIMED_EXPORT, apart=torch_alone.forks)


def _computed(compute: Callable[[], T], read: msgspec.json.Decoder[T], *, apart: bool) -> T:
    """What `compute` gives; computed apart where processes will be forked (engines/forked.py says why)."""
    return compute_apart(compute, read) if apart else compute()
