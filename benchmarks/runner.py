"""The runner: the options of every benchmark, and a command of each with progress, a table, and JSON.

A benchmark is a module with a function `run(options, say)`: `options` is its dataclass of `benchmarks.runner`,
`say` shows progress, and the result is a mapping of figures. The runner adds the header. Two names of figures have a
meaning here: `targets` holds bounds of figures by name, and `sound` decides the exit code. A list of mappings is
shown as a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any, Literal

import msgspec
import typer
from typer import Option

from muster.options import Data, parameters_of
from muster.output import Json, doing, emit, header
from muster.plain import say as say_line, show_table

# The options of every benchmark: a docstring is the help of its command, a field with a `typer.Option` an option.
#
# The other fields are for tests. Nothing heavy is imported here: the command line reads this at its start.

Models = Annotated[list[str] | None, Option("--model", help="A built-in model; may be repeated.  [default: all]")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The time of `muster demo`, and its phases.

    It runs as a command of its own. The figures are wall and CPU seconds of the command and all its processes, then
    mean seconds of the phases of a device's session and of the steps of a round in the coordinator. It takes as long as
    the demo does.
    """

    rounds: Annotated[int, Option(min=1, help="Rounds per algorithm.")] = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesOptions:
    """Learning curves of every algorithm.

    On a data set with users, in the engine. Each is tuned on a small grid and then trained with three seeds. The pages
    of `docs/algorithms/` show the results. One data set takes five minutes of CPU time.
    """

    dataset: Annotated[str, Option(help="Data set with users: digits (bundled) or wisdm.")] = "digits"
    data: Data = None
    rounds: Annotated[int, Option(min=1, help="Rounds of each training.")] = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Rounds of the engine, against bare torch steps.

    The bare steps are the same forward and backward passes on ready tensors, one client after the other, without any
    federated logic: the ratio says what the federated part costs, or what batching clients together gains. Workloads
    are synthetic, of EMNIST's shape. On a CPU also the speed of two processes against one, and the memory of each, on
    the first workload; on a GPU also cohorts of 50 to 5,000 clients, and the workloads on all cores. It takes four
    minutes. With --peers both engines
    run, and other simulators on the same cohorts, each in an environment of its own; the first run installs them. That
    takes ten minutes.
    """

    engine: Annotated[
        Literal["auto", "graphs", "torch"], Option(help="What trains the clients; the results say what auto took.")
    ] = "auto"
    device: Annotated[str, Option(help="Where torch computes: cpu, or a GPU as cuda or cuda:1.")] = "cpu"
    rounds: Annotated[int, Option(min=1, help="Rounds of each workload; their median counts.")] = 3
    peers: Annotated[
        bool, Option("--peers", help="Compare with pfl-research, FedJAX, Flower and a plain torch loop, on the CPU.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStepOptions:
    """A local step on devices' runtimes, against torch.

    Forward, backward and update on ONNX Runtime and ExecuTorch, on one thread: CPU milliseconds at batch 20, and their
    ratio to torch's. All models in both formats take several minutes, of which most goes into exporting.
    """

    models: Models = None
    formats: Annotated[
        list[str] | None, Option("--format", help="onnx or executorch; may be repeated.  [default: both]")
    ] = None
    blocks: Annotated[int, Option(min=1, help="Blocks of each runtime, in turns; the least time counts.")] = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesJsOptions:
    """Devices in TypeScript against Python's.

    On Node, or in a browser: a Chromium with the page of devices. CPU time of local training on both ONNX Runtimes,
    step by step, and what TypeScript spends outside of it; of packing a report for a secure round, of its noise and its
    masks. Both work in turns. Of the page also the bytes of its first load, CPU time until it can train, and memory. It
    needs Node 22.18, and takes several minutes, of which most goes into exporting; a browser ten more.
    """

    runtime: Annotated[Literal["node", "browser"], Option(help="Where TypeScript runs.")] = "node"
    models: Models = None
    dim: Annotated[int, Option(min=1, help="Values of the report that is packed and masked.")] = 1_000_000
    neighbours: Annotated[int, Option(min=1, max=255, help="Devices that it shares a mask with.")] = 32
    blocks: Annotated[int, Option(min=1, help="Blocks of each, in turns; the least time counts.")] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesJvmOptions:
    """Devices in Kotlin on a JVM against Python's.

    CPU time of local training, step by step, of whole sessions and of secure reports, in turns; memory, and CPU time
    from the start of a JVM to its first request. It needs Java and `make android`, and takes several minutes.
    """

    models: Models = None
    dim: Annotated[int, Option(min=1, help="Values of the secure report.")] = 1_000_000
    blocks: Annotated[int, Option(min=1, help="Blocks of each, in turns; the least time counts.")] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFootprintOptions:
    """The cost of a device: disk, start and memory.

    Megabytes installed, CPU seconds to import, memory while it trains. It installs the device extra into an empty
    folder, so it needs pip and PyPI, and takes half a minute.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelOptions:
    """A small language model in 32, 8 and 4 bits.

    It trains on one device, with its frozen weights in so many bits. The shape is SmolLM2-135M's, with drawn weights.
    The figures are the frozen blob, the peak of memory, CPU milliseconds of a step and of a prediction, and the
    distance from torch. It needs the extra `huggingface`, and takes six minutes.
    """

    shape: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersOptions:
    """Adapters in the engine, against peft.

    They are those of a pretrained model of MiniLM-L6's shape, with drawn weights. The figure is the CPU time of a round
    to that of plain torch, which trains the same clients one after the other, in turns in one process. It needs the
    extra `huggingface`, and takes two minutes.
    """

    clients: Annotated[int, Option(min=2, help="Clients of a round.")] = 20
    rounds: Annotated[int, Option(min=1, help="Rounds of each; their median counts.")] = 5
    shape: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecaggOptions:
    """CPU time and bytes of a secure aggregation.

    One device and the server of protocol SA1, on one thread. Also how fast masks are added, against bare AES-256-CTR.
    1000 devices take a minute.
    """

    n: Annotated[int, Option(min=8, help="Devices in the session.")] = 100
    dim: Annotated[int, Option(min=0, help="Length of a device's vector.")] = 1_000_000
    dropout: Annotated[
        float, Option(min=0, max=0.5, help="Share of devices that drop out after they shared their secrets.")
    ] = 0.1
    honest: Annotated[bool, Option("--honest", help="Without signatures, as in simulations.")] = False
    repeats: Annotated[int, Option(min=1, help="Runs; the least time counts.")] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SignaturesOptions:
    """The cost of signed requests, for coordinator and device.

    Against the bare signature, on one thread. CPU microseconds of a check-in with a body, for both algorithms that
    devices may sign with. It takes seconds.
    """

    blocks: Annotated[int, Option(min=1, help="Blocks of a hundred requests; the least time counts.")] = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """The cost of a prediction in an app, at one example.

    Against the bare call of ONNX Runtime on the same graph, in one run on one thread, in CPU microseconds. It takes
    seconds.
    """

    model: Annotated[str, Option(help="Name of a built-in model.")] = "logreg"
    blocks: Annotated[int, Option(min=1, help="Blocks of a thousand calls; the least time counts.")] = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckinOptions:
    """Check-ins per CPU second of the coordinator.

    The coordinator rejects them all. The yardstick in the same run is a bare FastAPI route, which only verifies and
    parses the same signed requests. Then check-ins come at 50, 100, 200 and again 50 % of the coordinator's saturation:
    it must shed the excess with a time to come back.
    """

    devices: Annotated[int, Option(min=1, help="Number of devices, which check in by turns.")] = 500
    blocks: Annotated[int, Option(min=1, help="Blocks of each server, in turns; the best of each counts.")] = 3
    seconds: Annotated[float, Option(min=0.1, help="Seconds of a block; a load takes twice as long.")] = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """CPU of check-ins and reports at replicas, or alone.

    Three coordinators run on one database of a PostgreSQL server that is started for it, and a fourth one alone on
    another. Check-ins come in turns to the one that is alone, and to one of the two that do not drive the population.
    So do reports, of 160 kB.
    """

    devices: Annotated[int, Option(min=16, help="Number of devices, which check in by turns.")] = 100
    blocks: Annotated[int, Option(min=1, help="Pairs of blocks of check-ins; the median over pairs counts.")] = 15
    seconds: Annotated[float, Option(min=0.1, help="CPU seconds of a block.")] = 2.0
    rounds: Annotated[int, Option(min=1, help="Pairs of rounds of reports; the median over pairs counts.")] = 15
    reports: Annotated[int, Option(min=1, help="Reports of a round.")] = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """CPU seconds of the coordinator for a report.

    The yardstick only receives a report's body, hashes it and adds it. Both take turns in one run; the ratio is the
    median over the pairs.
    """

    size: Annotated[list[int] | None, Option(min=1, help="Values in a report; may be repeated.")] = None
    devices: Annotated[int, Option(min=1, help="Reports in a round.")] = 400
    uploading: Annotated[int, Option(min=1, help="Reports sent at a time, at most.")] = 20
    pairs: Annotated[int, Option(min=1, help="Pairs of a round and the yardstick.")] = 7


BENCHMARKS: dict[str, type] = {
    "demo": DemoOptions,
    "curves": CurvesOptions,
    "engine": EngineOptions,
    "device_step": DeviceStepOptions,
    "devices_js": DevicesJsOptions,
    "devices_jvm": DevicesJvmOptions,
    "device_footprint": DeviceFootprintOptions,
    "language_model": LanguageModelOptions,
    "adapters": AdaptersOptions,
    "secagg": SecaggOptions,
    "signatures": SignaturesOptions,
    "predict": PredictOptions,
    "checkin": CheckinOptions,
    "scale": ScaleOptions,
    "report": ReportOptions,
}
"""Benchmarks by name: each is the function `run` of the module of that name in `benchmarks`."""


_SHOWN = 8
"""A longer list of numbers is in the JSON only."""


def add_to(app: typer.Typer) -> None:
    """Add `bench`, with a command for each benchmark, to an application."""
    group = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Run one benchmark. Each compares with a peer in the same run; --json prints one line to keep.",
    )
    for name, options in BENCHMARKS.items():
        group.command(name)(command_of(name, options))
    app.add_typer(group, name="bench")


def command_of(name: str, options: type) -> Callable[..., None]:
    """The command that runs the benchmark `name`. Its exit code is 1 when the result says that it is not sound."""

    def command(*, json: bool, **values: Any) -> None:
        """Run the benchmark, and show or print its figures."""
        benchmark = import_module(f"benchmarks.{name}")
        with doing(name) as say:
            figures = msgspec.to_builtins(benchmark.run(options(**values), say), str_keys=True)
        if json:
            emit(header(name) | figures)
        else:
            show(figures)
        raise typer.Exit(0 if figures.get("sound", True) else 1)

    command.__doc__ = options.__doc__
    command.__signature__ = inspect.Signature([*parameters_of(options), _JSON])  # type: ignore[attr-defined]
    return command


_JSON = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)


def show(figures: Mapping[str, Any]) -> None:
    """Print figures for people: single values one a line, with their targets, and each list of records as a table."""
    targets = figures.get("targets", {})
    single, tables = [], []
    for name, value in _flat({name: value for name, value in figures.items() if name != "targets"}):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            tables.append(value)
        elif _fits(value):
            single.append((name, value, targets.get(name)))
    if single:
        columns = ("figure", "value", "target") if targets else ("figure", "value")
        show_table(columns, [row[: len(columns)] for row in single])
    for records in tables:
        columns = tuple(name for name, value in records[0].items() if _fits(value))
        say_line("")
        show_table(columns, [[record[name] for name in columns] for record in records])


def _flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values; a mapping that does not fit in a cell gives `name.name` for each of its parts."""
    for name, value in figures.items():
        if isinstance(value, dict) and not _fits(value):
            yield from ((f"{name}.{part}", inner) for part, inner in value.items())
        else:
            yield name, value


def _fits(value: object) -> bool:
    """Whether a cell can show a value: a single one, a short list or a mapping of single ones."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    short = isinstance(value, dict) or len(parts) <= _SHOWN
    return short and not any(isinstance(part, dict | list | tuple) for part in parts)
