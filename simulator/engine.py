"""The engine: rounds of an algorithm over a population, without devices or network, with compressed reports or not.

It needs only torch, NumPy and msgspec, so it also runs on a bare GPU machine. It visits the examples that emulated
devices visit, in the same order: both reach the same model within float32 round-off (tests/simulator/test_keystone.py).
The clients of a cohort are trained in one of several ways, which are in `engines/`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from export.model import Model
from fedcore.algorithms.algorithm import Algorithm, ServerStep, figures_of, keeps_client_state, trips_of
from fedcore.algorithms.facts import for_model
from fedcore.algorithms.local_training import OWN, PartlyLocal
from fedcore.batching import StreamKey
from fedcore.codecs import RoundKey, decode, encode
from fedcore.compression import Compression, dequantise, quantise
from fedcore.params import Float32, ParamSchema
from fedcore.plan import in_turn
from fedcore.report import WEIGHT, ReportLayout, Segment
from fedcore.schedule import Range, ServerSchedule, Weighting
from simulator.engines.computing import Computing, compute_device
from simulator.engines.memory import ClientStates, cause, on_device, single_precision
from simulator.engines.processes import Blocks, CohortTrainer, OneProcess, Processes
from simulator.engines.sums import Client, RoundSums, layouts_of
from simulator.errors import Diverged
from simulator.population import Population
from simulator.private_training import PrivateSums

# Compressed reports in the engine: the mean that the coordinator decodes, instead of the exact one.
#
# Codecs are linear, so they are applied once, to the mean. Rounding is not. So if reports are quantised or masked,
# every client trains by itself. Its report is encoded, rounded with the random numbers of its device, and added up as
# the coordinator does it.


Train = Callable[[Blocks], RoundSums]
"""Trains the blocks of a cohort in a round, and gives their sums."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The server's result of a round: the mean report, its weight, sums of metrics by pass, the number of clients."""

    mean: dict[str, Tensor]
    weight: float
    metrics: dict[str, Tensor]
    contributors: int


class ReportSum(Protocol):
    """A sum of reports, each of which is rounded as it travels."""

    def add(self, values_V: Float32, weight: float, key: StreamKey) -> None:
        """Add the unweighted values (V,) of a device. key: of its random streams."""

    def total(self, key: RoundKey) -> NDArray[np.float64]:
        """The summed report, decoded: (L,). At least one must have been added."""


Begin = Callable[[ReportLayout, int], ReportSum]
"""Begins the sum of a round, of reports that travel in a layout."""


class QuantisedSum:
    """The sum of reports that are quantised in the clear."""

    def __init__(self, layout: ReportLayout, number: int) -> None:
        self._layout, self._total_L = layout, np.zeros(layout.size)

    def add(self, values_V: Float32, weight: float, key: StreamKey) -> None:
        """Add the unweighted values (V,) of a device. key: of its random streams."""
        uploaded = quantise(self._layout, self._layout.weigh(values_V, weight), key)
        self._total_L += dequantise(memoryview(uploaded), self._layout)

    def total(self, key: RoundKey) -> NDArray[np.float64]:
        """The summed report, decoded: (L,)."""
        return self._layout.decode(self._total_L, key)


@dataclass(frozen=True, slots=True)
class CompressedReports:
    """A compression for a model of a schema, with the random numbers of a seed.

    weighting: of devices. masked: begins the sums of secure rounds; None sums reports in the clear.
    """

    compression: Compression
    schema: ParamSchema
    seed: int
    weighting: Weighting
    masked: Begin | None = None

    def collect(self, number: int, train: Train, blocks: Blocks) -> Collected:
        """Train the cohort of round `number` and collect its reports; empty without contributors. Raises as `train`."""
        begin = self.masked or (QuantisedSum if self.compression.bits else None)
        if begin is not None:
            return self._one_by_one(number, train, [client for block in blocks for client in block], begin)
        sums = train(blocks)
        contributors, key = int(sums.contributors), RoundKey(self.seed, number)
        mean = {name: value / sums.weight for name, value in sums.report.items()} if contributors else {}
        for index, (name, value) in enumerate(mean.items()):
            chain = () if name in sums.layout.ranges else self.compression.codecs(value.numel(), self.schema)
            if chain:
                coded = encode(chain, value.cpu().numpy(), key, index)
                mean[name] = torch.from_numpy(decode(chain, coded, value.numel(), key, index)).to(value.device)
        return Collected(mean, float(sums.weight), sums.metrics, contributors)

    def _one_by_one(self, number: int, train: Train, clients: Sequence[Client], begin: Begin) -> Collected:
        """As `collect`, with every report on its own."""
        metrics: dict[str, Tensor] = {}
        summed: ReportSum | None = None
        key, contributors = RoundKey(self.seed, number), 0
        for client in clients:
            alone = train([[client]])
            weight = float(alone.weight)
            if not weight:
                continue
            layout = self.layout({name: value.numel() for name, value in alone.report.items()}, alone.layout.ranges)
            summed = summed or begin(layout, number)
            mean = {name: (value / weight).float().cpu().numpy() for name, value in alone.report.items()}
            summed.add(layout.concatenate(layout.encode(mean, key), weight), weight, client.key)
            metrics = {name: value + metrics.get(name, 0) for name, value in alone.metrics.items()}
            contributors += int(alone.contributors)
        if summed is None:
            return Collected({}, 0.0, {}, 0)
        parts = layout.decoded.split(summed.total(key))
        means = {name: torch.from_numpy(parts[name]).to(value.device) for name, value in alone.report.items()}
        return Collected(means, float(parts[WEIGHT][0]), metrics, contributors)

    def layout(self, sizes: Mapping[str, int], ranges: Mapping[str, Range]) -> ReportLayout:
        """The layout of a report as it travels, but for its metrics. sizes, ranges: of its vectors, by name."""
        segments = [Segment(name, size, "mean", range=ranges.get(name, UNSET)) for name, size in sizes.items()]
        whole = ReportLayout((*segments, Segment(WEIGHT, 1, "sum")), self.weighting)
        return self.compression.coded(whole, self.schema)


# The engine: rounds of an algorithm over a population, without devices or network.


COMPARED = 32
"""The examples of one client that an evaluation compares with each other."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round: per-example means by `pass.metric` with the figures of an evaluation, and how many clients
    were left out as non-finite."""

    metrics: dict[str, float]
    excluded: int


class Engine:
    """Runs rounds; holds the server state, and the states that clients keep between rounds."""

    def __init__(  # noqa: PLR0913  # who trains what, and how
        self,
        model: Model,
        algorithm: Algorithm,
        population: Population,
        *,
        seed: int = 0,
        computing: Computing = Computing(),
        compression: Compression = Compression(),
        private: PrivateSums | None = None,
        masked: Begin | None = None,
    ) -> None:
        population.check(model.spec.fields)
        self.model, self.population, self.seed = model, population, seed
        self.algorithm = algorithm = for_model(algorithm, model.metrics[1:], model.schema)
        self.computing, self.private = computing, private
        self._reports = CompressedReports(compression, model.schema, seed, algorithm.weighting, masked)
        self._device = compute_device(computing.home)
        initial = torch.from_numpy(model.initial).to(self._device)
        self._state = {name: vector.clone() for name, vector in algorithm.init(initial).items()}
        self._clients = ClientStates.of(algorithm, initial, len(population))
        self._trainer = self._cohort_trainer(computing)

    @property
    def state(self) -> dict[str, Float32]:
        """The server state, float32 vectors."""
        return {name: vector.cpu().numpy() for name, vector in self._state.items()}

    def restore(self, state: Mapping[str, Float32], client_states: Mapping[str, Float32] | None = None) -> None:
        """Continue from an earlier server state. Client states stay as they are unless given too."""
        self._state = {name: torch.from_numpy(vector).to(self._device) for name, vector in state.items()}
        for name, vectors in (client_states or {}).items():
            self._clients.vectors[name].copy_(torch.from_numpy(vectors))

    @property
    def own_models(self) -> Iterable[Float32] | None:
        """The model (D,) of every client, in order, with the parameters that it keeps; None if all share one."""
        algorithm, params_D = self.algorithm, self._state["params"].cpu()
        if not isinstance(algorithm, PartlyLocal):
            return None
        return (algorithm.personal(params_D, own.cpu()).numpy() for own in self._clients.vectors[OWN])

    @property
    def client_states(self) -> dict[str, Float32]:
        """A copy of the clients' states, float32 (clients, …); empty for most algorithms."""
        return {name: vectors.cpu().numpy().copy() for name, vectors in self._clients.vectors.items()}

    def begin(self, clients: Sequence[int]) -> None:
        """Give clients what a device keeps before its first round, which it makes of the model of that round."""
        if keeps_client_state(self.algorithm):
            for name, vector in self.algorithm.init_client(self._state["params"]).items():
                self._clients.vectors[name][list(clients)] = vector.to(self._clients.vectors[name].device)

    def run_round(
        self,
        number: int,
        cohort: Sequence[int],
        slots: Sequence[int] | None = None,
        schedule: ServerSchedule = ServerSchedule(),
        expected: int | None = None,
    ) -> RoundResult:
        """One round, from 1, of the clients in `cohort`: one trip of the algorithm. Moves the server state.

        slots: each client's slot, its index in the cohort by default; the slot keys a client's random order.
        schedule: of the server learning rate; the caller chooses the cohort. expected: the expected size of a cohort
        that was drawn by chance; private rounds count it instead of the actual size.
        Raises Diverged, with the reason, when no client contributes a finite report, and ProcessDied.
        """
        members, sizes = zip(cohort, slots or range(len(cohort)), strict=True), self.population.sizes
        # Longest first: the clients that still have a batch at step s are then a prefix.
        ordered = sorted(members, key=lambda member: -int(sizes[member[0]]))
        clients = [Client(index, StreamKey(self.seed, number, slot)) for index, slot in ordered]
        trip = in_turn(trips_of(self.algorithm), number)
        broadcast = trip.broadcast(self._state)
        train = functools.partial(self._trainer.train, number, broadcast)
        collected = self._reports.collect(number, train, self.computing.parts(self.model, clients))
        contributors = collected.contributors
        if contributors == 0:
            why = cause(self.model, self.state["params"], self.population, cohort, number - 1)
            raise Diverged(f"round {number}: no client has a finite report: {why}")
        counted, mean = contributors, collected.mean
        if self.private is not None:
            counted = expected or len(cohort)
            sums = {name: value * collected.weight for name, value in mean.items()}
            mean = self.private.mean(sums, broadcast, number, counted)
        step = ServerStep(
            devices=counted,
            layers=self.model.schema.layers,
            lr_scale=schedule.lr_scale(number, counted),
            participation=counted / len(self.population),
        )
        state = trip.update({name: vector.double() for name, vector in self._state.items()}, mean, step)
        self._state = {name: vector.float() for name, vector in state.items()}
        metrics = {
            f"{name}.{label}": value
            for name, sums_M in collected.metrics.items()
            for label, value in zip(self.model.metrics[1:], (sums_M[1:] / sums_M[0]).tolist(), strict=True)
        }
        return RoundResult(metrics | figures_of(trip, mean, step), len(cohort) - contributors)

    def _cohort_trainer(self, computing: Computing) -> CohortTrainer:
        model, algorithm = self.model, self.algorithm
        if computing.on_ray:
            from simulator.engines.ray_workers import RayWorkers, Work  # Ray is an extra

            return RayWorkers(Work(model, algorithm, self.population, computing), self._clients)
        layouts = layouts_of(model, algorithm)
        work = model, algorithm, self.population, self._clients
        if computing.processes == 1:
            return OneProcess(computing.trainer(*work), layouts, self._device)
        shares = map(computing.of_process, range(computing.processes))
        makes = [functools.partial(share.hosted_trainer, *work) for share in shares]
        return Processes(makes, layouts, [trip.broadcast(self._state) for trip in trips_of(algorithm)])


@single_precision()
def evaluate(
    model: Model, params: Float32, population: Population, *, device: str = "cpu", batch_size: int = 4096
) -> dict[str, NDArray[np.float64]]:
    """Mean loss and metrics of every client (clients,), under one model.

    A model that compares examples compares COMPARED of one client at a time.
    """
    population.check(model.spec.fields)
    target = compute_device(device)
    model, tensors = model.on(target), model.tensors(torch.from_numpy(params).to(target))
    examples = on_device(target, population.fields)
    parts: list[dict[str, Tensor]] = []
    with torch.no_grad():
        for start, end in _batches(population, batch_size, compared=model.spec.compares):
            batch = {name: array[start:end] for name, array in examples.items()}
            parts.append(model.measure(tensors, batch, torch.ones(end - start, device=target)))
    values = {name: torch.cat([part[name] for part in parts]).double().cpu().numpy() for name in parts[0]}
    return {name: np.add.reduceat(array, population.starts[:-1]) / population.sizes for name, array in values.items()}


def _batches(population: Population, size: int, *, compared: bool) -> Iterator[tuple[int, int]]:
    """The first example of each batch, and the one after its last."""
    starts = population.starts.tolist()
    runs = itertools.pairwise(starts) if compared else [(0, starts[-1])]
    for first, after in runs:
        for start in range(first, after, COMPARED if compared else size):
            yield start, min(start + (COMPARED if compared else size), after)


def evaluate_own(
    model: Model, models: Iterable[Float32], population: Population, *, device: str = "cpu"
) -> dict[str, NDArray[np.float64]]:
    """Mean loss and metrics of every client (clients,), each under a model (D,) of its own."""
    parts = [
        evaluate(model, params, population.subset([client]), device=device) for client, params in enumerate(models)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
