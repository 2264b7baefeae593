"""The demo from Python: a coordinator, an authority and emulated devices as processes of this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedcore.algorithms import create, module_of
from muster.local.server import memory_folder
from secagg.parameters import LEAST_COHORT

if TYPE_CHECKING:
    from muster.local.demo_tasks import DemoResult, OnProgress

ALGORITHMS, ROUNDS, DEVICES = ("mimelite", "fedadam"), 25, 20


def demo(  # noqa: PLR0913  # what is run, and what is kept of it
    algorithms: Sequence[str] = ALGORITHMS,
    *,
    rounds: int = ROUNDS,
    devices: int = DEVICES,
    seed: int = 0,
    plain: bool = False,
    out: Path | str | None = None,
    on_progress: OnProgress = lambda name, number, note: None,
) -> DemoResult:
    """Train a digit recogniser on 60 emulated devices, which speak HTTP to a real coordinator, and read digits with it.

    The best model is evaluated on held-out devices, released to all, and used on one of them (`DemoResult.app`).

    algorithms: names, or one's own as package.module:Class. devices: per round, of 60; with 8 or more, reports are
    summed under secure aggregation, unless `plain`. out: a new folder that keeps the run of each algorithm as that of a
    simulation, with its plan. on_progress: called with an algorithm, its committed rounds, and a note. Takes about
    a minute. Raises DemoFailed, UnknownAlgorithm, TypeError, RunError when the folder is there, and RunNotKept
    when it cannot be made.
    """
    if isinstance(algorithms, str):
        raise TypeError(f"algorithms is a text; expected several names, such as [{algorithms!r}]")
    names = tuple(dict.fromkeys(algorithms))
    for name in names:
        create(name, None, [module_of(name)])
    secure, kept = devices >= LEAST_COHORT and not plain, None if out is None else Path(out)
    return trained(names, rounds, devices, seed, secure=secure, out=kept, begin=lambda: on_progress)


def trained(  # noqa: PLR0913  # a demo's settings, and who watches
    names: tuple[str, ...],
    rounds: int,
    devices: int,
    seed: int,
    *,
    secure: bool,
    out: Path | None,
    begin: Callable[[], OnProgress],
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> DemoResult:
    """Run all algorithms in a folder that is removed at the end, but for what `out` keeps.

    loading: around the import of large libraries. begin: called after it, to be told of progress.
    """
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(_folder(out))
        # Sixty phones do not wait for one disk, as sixty emulated devices would.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-demo-", dir=memory_folder())))
        with loading():
            # Coordinator and devices start meanwhile, on another core.
            from muster.local.server import starting_coordinator
            from simulator.fleet.fork_servers import HERE, fork_servers

            modules = ",".join(filter(None, map(module_of, names)))
            started = stack.enter_context(starting_coordinator(folder, secure=secure, algorithms=modules))
            servers = stack.enter_context(fork_servers({HERE: ["onnxruntime"]}))
            from muster.local.demo_tasks import DemoConfig, run_demo
            from simulator.engines.memory import one_thread

        stack.enter_context(one_thread())
        config = DemoConfig(names, rounds, devices, folder, seed, secure, out)
        return run_demo(config, servers, started, begin())


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """The new folder of what is kept, made before anything is trained; it goes again where nothing was kept."""
    from simulator.runs.running import check_free, writing  # others need not load it

    check_free(out)
    with writing(out):
        out.mkdir(parents=True)
    try:
        yield
    finally:
        with suppress(OSError):
            out.rmdir()
