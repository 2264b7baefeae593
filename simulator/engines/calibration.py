"""Calibration: what a client's step costs with each engine on this machine, measured once and kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
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
from simulator.engines.clients import Client
from simulator.engines.computing import Computing
from simulator.engines.sums import RoundSums, layouts_of
from simulator.population import Population

# So many clients train, on so many batches each, for so many steps of a pass, until so many CPU seconds are spent.
CLIENTS, BATCHES, STEPS, BUDGET_S = 10, 2, 10, 0.3


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
    """What is to be trained, and how much: `clients` is how many train in all rounds together."""

    model: Model
    algorithm: Algorithm
    population: Population
    clients: int

    @property
    def steps(self) -> float:
        """The steps of them all, as far as can be known before they are drawn."""
        sizes = self.population.sizes.tolist()
        trips = trips_of(self.algorithm)
        of_all = sum(item.loop.step_count(size) for trip in trips for item in trip.passes for size in sizes)
        return self.clients * of_all / len(sizes) / len(trips)

    def sample(self) -> Population:
        """A few of the clients, with the first of their examples."""
        most = BATCHES * max(item.loop.batch_size for trip in trips_of(self.algorithm) for item in trip.passes)
        chosen = np.linspace(0, len(self.population) - 1, min(CLIENTS, len(self.population))).astype(int)
        shards = [
            {name: array[:most] for name, array in self.population.shard(index).items()} for index in chosen.tolist()
        ]
        return Population.of([str(index) for index in chosen], shards)


def seconds_per_step(task: Task, computing: Computing) -> float:
    """CPU seconds of a client's step: the least of some runs of all trips, after one that warms caches.

    Raises EngineError or ExportError when the model does not run.
    """
    initial, sample = torch.from_numpy(task.model.initial), task.sample()
    kept = ClientStates.of(task.algorithm, initial, len(sample))
    algorithm, state = cast("Algorithm", _Shortened(task.algorithm)), task.algorithm.init(initial)
    trainer = _shortened_graphs(computing).trainer(task.model, algorithm, sample, kept)
    trips, layouts = trips_of(algorithm), layouts_of(task.model, task.algorithm)
    clients = sorted(range(len(sample)), key=lambda index: -int(sample.sizes[index]))[: computing.together(task.model)]
    cohort = [Client(index, StreamKey(0, 1, slot)) for slot, index in enumerate(clients)]
    steps = sum(
        item.loop.step_count(int(sample.sizes[index])) for trip in trips for item in trip.passes for index in clients
    )
    spent: list[float] = []
    while len(spent) < 2 or sum(spent) < BUDGET_S:
        start = time.process_time()
        for number in range(1, len(trips) + 1):
            layout = in_turn(layouts, number)
            sums = RoundSums(layout, torch.empty(layout.size, dtype=torch.float64))
            trainer.train(number, in_turn(trips, number).broadcast(state), cohort, sums)
        spent.append(time.process_time() - start)
    return min(spent[1:]) / steps


class _Shortened:
    """An algorithm of which clients take no more than the first steps of each pass."""

    def __init__(self, whole: Algorithm) -> None:
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    @property
    def trips(self) -> tuple[Exchange, ...]:
        """The trips of the whole algorithm, with fewer steps."""
        return tuple(
            Exchange(
                tuple(replace(item, loop=_first_steps(item.loop)) for item in trip.passes),
                trip.broadcast,
                trip.report,
                trip.update,
            )
            for trip in trips_of(self._whole)
        )


def _shortened_graphs(computing: Computing) -> Computing:
    """The same computing; where it is on graphs, clients take no more than the first steps of each pass."""
    if computing.graphs is None:
        return computing
    shortened = []
    for plan, graphs in computing.graphs:
        passes = tuple(msgspec.structs.replace(one, loop=_first_steps(one.loop)) for one in plan.passes)
        shortened.append((msgspec.structs.replace(plan, passes=passes), graphs))
    return replace(computing, graphs=shortened)


def _first_steps(loop: Loop) -> Loop:
    return msgspec.structs.replace(loop, steps=min(STEPS, loop.steps or STEPS))


class Notes:
    """The figures that this machine keeps for a model and an algorithm, in the user's cache."""

    def __init__(self, task: Task) -> None:
        import onnxruntime  # noqa: PLC0415  # several distributions have it, each with a name of its own

        model, algorithm = task.model, task.algorithm
        parts = [platform.node(), torch.__version__, onnxruntime.__version__, name_of(algorithm), algorithm]
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
