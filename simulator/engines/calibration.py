"""Calibration: what a client's step costs with each engine on this machine, measured once and kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from export.model import Model
from fedcore.algorithms import name_of
from fedcore.algorithms.algorithm import Algorithm, Exchange, trips_of
from fedcore.batching import StreamKey
from fedcore.decoding import UNDECODABLE, decoder
from fedcore.loop import Loop
from fedcore.plan import in_turn
from simulator.client_states import ClientStates
from simulator.engines.clients import Client, block_size
from simulator.engines.computing import Computing
from simulator.engines.processes import OneProcess
from simulator.engines.sums import layouts_of
from simulator.population import Population

# A block of clients trains on FEW batches each; to compare engines on MANY, unless that takes longer than LONG_S.
FEW, MANY, LONG_S = 2, 10, 2.0
# With each engine in turn, until so many CPU seconds are spent with each.
BUDGET_S = 0.3


class GraphFigures(msgspec.Struct, frozen=True):
    """CPU seconds of a client's step on graphs, and of their export."""

    step_s: float
    export_s: float


class Figures(msgspec.Struct, frozen=True):
    """CPU seconds of a client's step with torch; of graphs, once they were tried."""

    torch_s: float
    of_graphs: GraphFigures | None = None


_FIGURES = decoder(Figures)


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be trained, and how much: `cohort` clients in a round, `clients` in all rounds together."""

    model: Model
    algorithm: Algorithm
    population: Population
    cohort: int
    clients: int

    @property
    def steps(self) -> float:
        """The steps of them all, as far as can be known before they are drawn."""
        return self.clients * self.steps_of_client

    @property
    def steps_of_client(self) -> float:
        """The steps that a client takes in a round, on average."""
        sizes, trips = self.population.sizes.tolist(), trips_of(self.algorithm)
        of_all = sum(item.loop.step_count(size) for trip in trips for item in trip.passes for size in sizes)
        return of_all / len(sizes) / len(trips)

    def sample(self, clients: int, batches: int) -> Population:
        """So many of the clients, if there are, with the first of their examples: so many batches."""
        most = batches * max(item.loop.batch_size for trip in trips_of(self.algorithm) for item in trip.passes)
        chosen = np.linspace(0, len(self.population) - 1, min(clients, len(self.population))).astype(int)
        shards = [
            {name: array[:most] for name, array in self.population.shard(index).items()} for index in chosen.tolist()
        ]
        return Population.of([str(index) for index in chosen], shards)


def seconds_per_step(task: Task, *computings: Computing) -> list[float]:
    """CPU seconds of a client's step with each computing, where a block of the cohort is trained.

    It is the least of some runs of all trips, after one that warms caches. They take turns, so that what else the
    machine does meets all alike. Raises EngineError or ExportError when the model does not run.
    """
    blocks = [_Block(task, computing, FEW) for computing in computings]
    for block in blocks:
        block.run()
    # A comparison by clients of few steps would weigh what is done once for each of them, such as the report, too much.
    if len(computings) > 1 and max(block.run() for block in blocks) * MANY / FEW < LONG_S:
        blocks = [_Block(task, computing, MANY) for computing in computings]
        for block in blocks:
            block.run()
    spent: list[list[float]] = [[] for _ in blocks]
    while not all(spent) or min(map(sum, spent)) < BUDGET_S:
        for block, times in zip(blocks, spent, strict=True):
            times.append(block.run())
    return [min(times) / block.steps for block, times in zip(blocks, spent, strict=True)]


class _Block:
    """A block of the cohort, with so many batches of each client, and what trains it. steps: of all clients, trips."""

    def __init__(self, task: Task, computing: Computing, batches: int) -> None:
        initial = torch.from_numpy(task.model.initial)
        sample = task.sample(min(task.cohort, block_size(task.cohort, computing.together(task.model))), batches)
        kept = ClientStates.of(task.algorithm, initial, len(sample))
        algorithm = cast("Algorithm", _Shortened(task.algorithm, batches))
        # As many clients together as where they take all of their steps.
        at_once = computing.together(task.model, math.ceil(task.steps_of_client))
        shortened = replace(_shortened_graphs(computing, batches), at_once=at_once)
        trainer = shortened.trainer(task.model, algorithm, sample, kept)
        self._state, self._trips = task.algorithm.init(initial), trips_of(algorithm)
        # Adding up the sums of blocks is a part of the work.
        self._whole = OneProcess(trainer, layouts_of(task.model, task.algorithm), torch.device(computing.device))
        longest_first = sorted(range(len(sample)), key=lambda index: -int(sample.sizes[index]))
        self._clients = [Client(index, StreamKey(0, 1, slot)) for slot, index in enumerate(longest_first)]
        loops = [item.loop for trip in self._trips for item in trip.passes]
        self.steps = sum(loop.step_count(size) for loop in loops for size in sample.sizes.tolist())

    def run(self) -> float:
        """Train all trips; gives the CPU seconds."""
        start = time.process_time()
        for number in range(1, len(self._trips) + 1):
            self._whole.train(number, in_turn(self._trips, number).broadcast(self._state), [self._clients])
        return time.process_time() - start


class _Shortened:
    """An algorithm of which clients take no more than so many first `steps` of each pass."""

    def __init__(self, whole: Algorithm, steps: int) -> None:
        self._whole, self._steps = whole, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    @property
    def trips(self) -> tuple[Exchange, ...]:
        """The trips of the whole algorithm, with fewer steps."""
        return tuple(
            Exchange(
                tuple(replace(item, loop=_first_steps(item.loop, self._steps)) for item in trip.passes),
                trip.broadcast,
                trip.report,
                trip.update,
            )
            for trip in trips_of(self._whole)
        )


def _shortened_graphs(computing: Computing, steps: int) -> Computing:
    """The same computing; where it is on graphs, clients take no more than so many first steps of each pass."""
    if computing.graphs is None:
        return computing
    shortened = []
    for trip in computing.graphs:
        passes = tuple(msgspec.structs.replace(one, loop=_first_steps(one.loop, steps)) for one in trip.plan.passes)
        plan = msgspec.structs.replace(trip.plan, passes=passes)
        shortened.append(msgspec.structs.replace(trip, plan=plan))
    return replace(computing, graphs=shortened)


def _first_steps(loop: Loop, steps: int) -> Loop:
    return msgspec.structs.replace(loop, steps=min(steps, loop.steps or steps))


class Notes:
    """The figures that this machine keeps for a task, in the user's cache: they hold where cohort and data are alike.

    What a step costs depends on how many steps a client takes, and on how many clients are in a block.
    """

    def __init__(self, task: Task) -> None:
        # Loaded as devices load it, without its telemetry; several distributions have it, each with a name of its own.
        from device_runtime.backends.onnxruntime import OnnxRuntime  # noqa: PLC0415

        model, algorithm = task.model, task.algorithm
        parts = [platform.node(), torch.__version__, OnnxRuntime.runtime, name_of(algorithm), algorithm]
        parts += [round(math.log2(task.cohort)), round(math.log2(task.steps_of_client)), FEW, MANY, LONG_S, BUDGET_S]
        parts += [model.spec.name, model.spec.fields, model.schema, model.module, *_sources(model, algorithm)]
        digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._path = Path(cache) / "muster" / f"engine-{digest[:16]}.json"

    def read(self) -> Figures | None:
        """The figures, or None before the first calibration."""
        try:
            return _FIGURES.decode(self._path.read_bytes())
        except (OSError, *UNDECODABLE):
            return None

    def write(self, figures: Figures) -> None:
        """Keep the figures, if there is a place for them: what cannot be kept is measured again."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}")
            part.write_bytes(msgspec.json.encode(figures))
            part.replace(self._path)


def modules_of(model: Model, algorithm: Algorithm) -> set[str]:
    """The names of the modules that the code of a model and an algorithm is in."""
    spec = model.spec
    code = [spec.make, spec.loss, *spec.metrics.values(), *map(type, model.module.modules()), type(algorithm)]
    return {one.__module__ for one in code if hasattr(one, "__module__")}


def _sources(model: Model, algorithm: Algorithm) -> list[str]:
    """Digests of the files that the code of a model and an algorithm is in, as far as it is in files."""
    files = {getattr(sys.modules.get(name), "__file__", None) for name in modules_of(model, algorithm)}
    found = sorted(Path(file) for file in files if file)
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in found if file.is_file()]
