"""Calibration: what a client's step costs with each engine on this machine, measured once and kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import torch

from export.model import Model
from fedcore.algorithms import name_of
from fedcore.algorithms.algorithm import Algorithm, trips_of
from fedcore.batching import StreamKey
from fedcore.decoding import UNDECODABLE, decoder
from fedcore.plan import in_turn
from simulator.client_states import ClientStates
from simulator.engines.clients import Client
from simulator.engines.computing import Computing
from simulator.engines.sums import RoundSums, layouts_of
from simulator.population import Population

# So many clients train, on so many batches each, until so many CPU seconds are spent.
CLIENTS, BATCHES, BUDGET_S = 10, 2, 0.3


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
    trainer, state = computing.trainer(task.model, task.algorithm, sample, kept), task.algorithm.init(initial)
    trips, layouts = trips_of(task.algorithm), layouts_of(task.model, task.algorithm)
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


class Notes:
    """The figures that this machine keeps for a model and an algorithm, in the user's cache."""

    def __init__(self, task: Task) -> None:
        machine = [platform.node(), *(version(name) for name in ("torch", "onnxruntime"))]
        parts = [*machine, task.model.spec.name, task.model.schema, name_of(task.algorithm), task.algorithm]
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
