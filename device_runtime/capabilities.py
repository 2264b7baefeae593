"""Capabilities of this installation, and the footprint of a plan on it."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping
from functools import cache
from heapq import nlargest
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray

from device_runtime.backends import BACKENDS, FORMATS
from device_runtime.backends.backend import Arrays, Executable
from device_runtime.errors import NonFiniteReport
from device_runtime.runner import execute, steps_of
from device_runtime.trainer import Job, Trainer
from fedcore.batching import StreamKey
from fedcore.bundle import Footprint
from fedcore.conditions import rounded_down, rounded_mb
from fedcore.params import Float32, Frozen
from fedcore.plan import Field, Plan, loop_graph, steps_graph
from fedcore.wire.messages import LONGEST_NAME, MOST_COLLECTIONS, StatedCapabilities

# The footprint of a plan on this machine: each pass once over random examples, in a process that loads nothing else.
#
#     python -m device_runtime.capabilities FOLDER FORMAT
#
# reads `FOLDER/plan.json` and the graphs at `FOLDER/<sha256>`, and prints a Footprint as JSON. Memory is that of the
# whole process: interpreter, runtime, graphs, vectors and examples.

STEPS = 5
IGNORED_SHARE = 0.2


class _Timed:
    """An executable that records the least CPU time of a run, or of one of its steps, in `best_s` under its name."""

    def __init__(self, name: str, graph: Executable, best_s: dict[str, float]) -> None:
        self._name, self._graph, self._best_s = name, graph, best_s

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        started = time.process_time()
        self._graph.run(inputs, outputs)
        cpu_s = (time.process_time() - started) / steps_of(inputs)
        self._best_s[self._name] = min(self._best_s.get(self._name, math.inf), cpu_s)


def measure(plan: Plan, graphs: Mapping[str, bytes], form: str) -> Footprint:
    """Run every pass for a few steps, and the report. graphs: those of the format `form`, by name."""
    job, frozen = random_job(plan, graphs), random_frozen(plan)
    engine = BACKENDS[FORMATS[form]](alone=True)
    best_s: dict[str, float] = {}
    loaded: dict[str, Executable] = {
        name: _Timed(name, engine.load(graph, name), best_s) for name, graph in job.graphs.items()
    }
    with contextlib.suppress(NonFiniteReport):  # a random model may diverge; its steps cost the same
        execute(job.plan, loaded, job.broadcast, job.examples, job.key, frozen=frozen, kept=job.kept)
    dearest = max(best_s[loop_graph(graphs, pass_plan.name)] for pass_plan in plan.passes)
    return Footprint(
        step_cpu_ms=1e3 * dearest,
        peak_rss_mb=peak_rss_mb(),
        graph_bytes=sum(len(graph) for graph in graphs.values()) + (plan.frozen.blob.size if plan.frozen else 0),
    )


def random_job(plan: Plan, graphs: Mapping[str, bytes]) -> Job:
    """A job of a few steps in every pass, over random examples; short steps run twice, as the first call is slower."""
    passes = tuple(
        replace(
            pass_plan,
            loop=replace(pass_plan.loop, epochs=2 if steps_graph(pass_plan.name) in graphs else 1, steps=None),
        )
        for pass_plan in plan.passes
    )
    random = np.random.default_rng(0)
    count = STEPS * max(pass_plan.loop.batch_size for pass_plan in passes)
    return Job(
        plan=replace(plan, passes=passes),
        graphs=dict(graphs),
        examples={item.name: random_field(item, count, random) for item in plan.examples.fields},
        broadcast={spec.name: _vector(spec.size, random) for spec in plan.broadcast},
        kept={spec.name: _vector(spec.size, random) for spec in plan.kept} or None,
        key=StreamKey(0, 0, 0),
    )


def random_field(item: Field, count: int, random: np.random.Generator) -> NDArray[np.generic]:
    """Examples of a field (count, *shape): normal, or uniform below `high`, and some that are ignored."""
    shape = (count, *item.shape)
    if item.high is None:
        return random.normal(size=shape).astype(item.dtype)
    values = random.integers(0, item.high, shape).astype(item.dtype)
    if item.ignored is not UNSET:
        values[random.random(shape) < IGNORED_SHARE] = item.ignored
    return values


def _vector(size: int, random: np.random.Generator) -> Float32:
    """A vector of small positive values: a second moment must be positive, and models should stay finite."""
    values = random.standard_normal(size, np.float32)
    np.abs(values, out=values)
    values *= np.float32(0.01)
    return values


def random_frozen(plan: Plan) -> dict[str, Frozen]:
    """Frozen vectors of a plan: such vectors, and codes of weights. They take the memory that their file would."""
    random, vectors = np.random.default_rng(1), plan.frozen.vectors if plan.frozen else ()
    return {
        spec.name: random.integers(0, 256, spec.size, np.uint8) if spec.dtype == "uint8" else _vector(spec.size, random)
        for spec in vectors
    }


def peak_rss_mb() -> float:
    """The peak of this process's resident memory, in 2^20 bytes.

    This is not ru_maxrss, which a process inherits from its parent.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return math.nan


def read_plan(folder: Path, form: str) -> tuple[Plan, dict[str, bytes]]:
    """The plan in a folder, and its graphs of a format, by name."""
    plan = Plan.decode((folder / "plan.json").read_bytes())
    return plan, {name: ref.check((folder / ref.sha256).read_bytes()) for name, ref in plan.graphs[form].items()}


def main() -> None:
    """Measure what the command line names."""
    plan, graphs = read_plan(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.write(msgspec.json.encode(measure(plan, graphs, sys.argv[2])).decode())


if __name__ == "__main__":
    main()


SECAGG = ("SA1",)


def capabilities(trainer: Trainer) -> StatedCapabilities:
    """The capabilities of a device with this trainer."""
    return StatedCapabilities(
        runtime="muster",
        version=_version(),
        engine=trainer.runtime,
        formats=(trainer.format,),
        secagg=SECAGG,
        keeps_vectors=True,
        memory_mb=_memory_mb(),
    )


def stated_examples(counts: Mapping[str, int]) -> dict[str, int]:
    """The numbers of examples that a device states, by collection: rounded down, only for the largest collections."""
    short = (name for name in counts if len(name) <= LONGEST_NAME)
    return {name: rounded_down(counts[name]) for name in nlargest(MOST_COLLECTIONS, short, key=counts.__getitem__)}


@cache
def _version() -> str:
    # The lookup searches the files of all installed packages, which takes milliseconds.
    return version("muster-fl")


def _memory_mb() -> int | None:
    try:
        return rounded_mb(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):  # a system that does not say
        return None
