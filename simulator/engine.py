"""The vectorised engine: a cohort of clients at once, on the algorithm's own functions.

It needs only torch, NumPy and msgspec, so it also runs on a bare GPU machine. It visits the examples that emulated
devices visit, in the same order: both reach the same model within float32 round-off (tests/simulator/test_keystone.py).

Shapes: K clients, D parameters, B batch, S steps, M metric sums, N examples of the whole population.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.modules.conv import _ConvNd

from export.errors import ExportError, reason
from export.model import Model
from export.rewrites import Traceable
from fedcore.algorithms.algorithm import (
    Algorithm,
    Broadcast,
    Carry,
    ClientState,
    Pass,
    Report,
    ServerStep,
    Trip,
    keeps_client_state,
    trips_of,
    with_carries,
)
from fedcore.batching import StreamKey, batches, noise
from fedcore.params import Float32
from fedcore.plan import in_turn
from fedcore.report import weight_of
from fedcore.schedule import ServerSchedule
from simulator.client_states import ClientStates
from simulator.diagnose_loss import cause
from simulator.errors import Diverged, EngineError
from simulator.population import Population

# So many parameters at most are vectorised together in networks with convolutions.
CONVOLVED_TOGETHER = 1_000_000


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round: per-example means by `pass.metric`, and how many clients were left out as non-finite."""

    metrics: dict[str, float]
    excluded: int


@dataclass(slots=True)
class _Sums:
    """The sums of a round, in float64."""

    report: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    weight: float = 0.0
    contributors: int = 0

    def add(self, report_K: Report, metrics_K: Mapping[str, Tensor], weight_K: Tensor, kept_K: ClientState) -> Tensor:
        """Add the clients whose every value is finite once weighted; the others count in nothing, as on a device.

        Gives which those are, bool (K,).
        """
        weighted = {name: value * weight_K[:, None] for name, value in report_K.items()}
        everything = [*weighted.values(), *metrics_K.values(), *kept_K.values()]
        finite_K = torch.stack([torch.isfinite(value).all(-1) for value in everything]).all(0)
        for sums, values in ((self.report, weighted), (self.metrics, metrics_K)):
            for name, value in values.items():
                kept = torch.where(finite_K[:, None], value, 0)
                sums[name] = sums.get(name, 0) + kept.sum(0, dtype=torch.float64)
        self.weight += float((weight_K * finite_K).sum(dtype=torch.float64))
        self.contributors += int(finite_K.sum())
        return finite_K


class Engine:
    """Runs rounds on one compute device; holds the server state and the whole population's examples there.

    at_once: how many clients are vectorised together; chosen by model and device when not given.
    """

    def __init__(
        self,
        model: Model,
        algorithm: Algorithm,
        population: Population,
        *,
        seed: int = 0,
        device: str = "cpu",
        at_once: int | None = None,
    ) -> None:
        population.check(model.spec.fields)
        self._device = compute_device(device)
        self._model, self._algorithm, self._population, self._seed = model, algorithm, population, seed
        self._at_once = at_once or _clients_at_once(model, self._device)
        self._examples = _on(self._device, population.fields)
        initial = torch.from_numpy(model.initial).to(self._device)
        self._state = {name: vector.clone() for name, vector in algorithm.init(initial).items()}
        self._clients = ClientStates.of(algorithm, initial, len(population))

    @property
    def state(self) -> dict[str, Float32]:
        """The server state, float32 vectors."""
        return {name: vector.cpu().numpy() for name, vector in self._state.items()}

    @property
    def client_states(self) -> dict[str, Float32]:
        """A copy of what the clients keep between rounds, float32 (clients, …); empty for most algorithms."""
        return {name: vectors.cpu().numpy().copy() for name, vectors in self._clients.vectors.items()}

    def run_round(
        self,
        number: int,
        cohort: Sequence[int],
        slots: Sequence[int] | None = None,
        schedule: ServerSchedule = ServerSchedule(),
    ) -> RoundResult:
        """One round, from 1, of the clients in `cohort`: one trip of the algorithm. Moves the server state.

        slots: each client's slot, its index in the cohort by default; the slot keys a client's random order.
        schedule: of the server learning rate; the cohort is the caller's.
        Raises Diverged, saying why, when no client contributes a finite report.
        """
        members = zip(cohort, slots or range(len(cohort)), strict=True)
        # Longest first: the clients that still have a batch at step s are then a prefix.
        ordered = sorted(members, key=lambda member: -int(self._population.sizes[member[0]]))
        clients = [(client, StreamKey(self._seed, number, slot)) for client, slot in ordered]
        sums, trip = _Sums(), in_turn(trips_of(self._algorithm), number)
        for start in range(0, len(clients), self._at_once):
            self._train(trip, clients[start : start + self._at_once], sums)
        if sums.contributors == 0:
            why = cause(self._model, self.state["params"], self._population, cohort, number - 1)
            raise Diverged(f"round {number}: no client has a finite report: {why}")
        mean = {name: value / sums.weight for name, value in sums.report.items()}
        step = ServerStep(
            devices=sums.contributors,
            layers=self._model.schema.layers,
            lr_scale=schedule.lr_scale(number, sums.contributors),
            participation=sums.contributors / len(self._population),
        )
        state = trip.update({name: vector.double() for name, vector in self._state.items()}, mean, step)
        self._state = {name: vector.float() for name, vector in state.items()}
        metrics = {
            f"{name}.{label}": value
            for name, sums_M in sums.metrics.items()
            for label, value in zip(self._model.metrics[1:], (sums_M[1:] / sums_M[0]).tolist(), strict=True)
        }
        return RoundResult(metrics, len(cohort) - sums.contributors)

    def _train(self, trip: Trip, clients: Sequence[tuple[int, StreamKey]], sums: _Sums) -> None:
        """Run every pass of a trip for some clients and add their reports and metrics to `sums`."""
        indices = [client for client, _ in clients]
        broadcast = trip.broadcast(self._state) | self._clients.gather(indices)
        carries: dict[str, Carry] = {}
        metrics: dict[str, Tensor] = {}
        for index, item in enumerate(trip.passes):
            received = with_carries(broadcast, carries)
            carries[item.name], metrics[item.name] = self._run_pass(index, item, received, clients)
        report = trip.report(broadcast, carries)
        kept = self._algorithm.keep(broadcast, carries) if keeps_client_state(self._algorithm) else {}
        finite = sums.add(report, metrics, self._weights(indices), kept)
        self._clients.scatter(indices, kept, finite)

    def _run_pass(
        self, index: int, item: Pass, received: Broadcast, clients: Sequence[tuple[int, StreamKey]]
    ) -> tuple[Carry, Tensor]:
        """The last carry (K, …) and the metric sums (K, M) of every client."""
        carry = {
            name: vector.expand(len(clients), vector.shape[-1]).clone() for name, vector in item.begin(received).items()
        }
        sums_KM = torch.zeros(len(clients), len(self._model.metrics), device=self._device)
        for number, (rows, mask) in enumerate(self._steps(index, item, clients)):
            active = len(rows)
            where = torch.from_numpy(rows).to(self._device)
            batch = {name: array[where] for name, array in self._examples.items()}
            drawn = self._noise(index, number, item.loop.batch_size, clients[:active])
            oracle = CohortOracle(self._model, batch, torch.from_numpy(mask).to(self._device), drawn)
            after = item.step(_first(active, carry), _first(active, received), oracle)
            for name, vector in after.items():
                carry[name][:active] = vector
            sums_KM[:active] += oracle.sums_KM
        return carry, sums_KM

    def _steps(
        self, index: int, item: Pass, clients: Sequence[tuple[int, StreamKey]]
    ) -> Iterator[tuple[NDArray[np.int64], Float32]]:
        """For each step, rows (A, B) into the population's examples and masks (A, B) of the A clients still active."""
        sizes, starts = self._population.sizes, self._population.starts
        schedules = [
            [(starts[client] + rows, mask) for rows, mask in batches(item.loop, int(sizes[client]), key, index)]
            for client, key in clients
        ]
        for step in range(len(schedules[0])):
            active = [schedule[step] for schedule in schedules if step < len(schedule)]
            yield np.stack([rows for rows, _ in active]), np.stack([mask for _, mask in active])

    def _noise(self, index: int, step: int, size: int, clients: Sequence[tuple[int, StreamKey]]) -> Tensor | None:
        """The seeds of the clients' dropout in this step, int32 (A, B), or None when nothing is dropped."""
        if not self._model.noisy:
            return None
        return torch.from_numpy(np.stack([noise(key, index, step, size) for _, key in clients])).to(self._device)

    def _weights(self, clients: Sequence[int]) -> Tensor:
        weights = [weight_of(self._algorithm.weighting, int(self._population.sizes[client])) for client in clients]
        return torch.tensor(weights, dtype=torch.float32, device=self._device)


class CohortOracle:
    """The gradient oracle of the algorithm contract for K clients, each on a batch of its own."""

    def __init__(
        self, model: Model, batch: Mapping[str, Tensor], mask_KB: Tensor, noise_KB: Tensor | None = None
    ) -> None:
        self._model, self._batch, self._mask_KB, self._noise_KB = model, dict(batch), mask_KB, noise_KB
        self.sums_KM = mask_KB.new_zeros(mask_KB.shape[0], len(model.metrics))

    def __call__(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """params: (K, D), or (D,) when all clients share them. Gives (K, 1), (K, D), (K, 1)."""
        shared = None if params.dim() == 1 else 0
        gradient = vmap(
            grad_and_value(self._model.loss, has_aux=True),
            (shared, 0, 0, None if self._noise_KB is None else 0),
        )
        tensors = self._model.tensors(params)
        try:
            with Traceable():
                gradients, (loss_K, self.sums_KM) = gradient(tensors, self._batch, self._mask_KB, self._noise_KB)
        except ExportError:
            raise
        except Exception as error:  # anything that the user's own code raises
            raise EngineError(f"the model {self._model.spec.name} does not run here: {reason(error)}") from error
        flat_KD = torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)
        return loss_K[:, None], flat_KD, self.sums_KM[:, :1]


def evaluate(
    model: Model, params: Float32, population: Population, *, device: str = "cpu", batch_size: int = 4096
) -> dict[str, NDArray[np.float64]]:
    """Mean loss and metrics of every client (clients,), under one model."""
    population.check(model.spec.fields)
    target = compute_device(device)
    tensors = model.tensors(torch.from_numpy(params).to(target))
    examples = _on(target, population.fields)
    parts: list[dict[str, Tensor]] = []
    with torch.no_grad():
        for start in range(0, int(population.starts[-1]), batch_size):
            batch = {name: array[start : start + batch_size] for name, array in examples.items()}
            parts.append(model.measure(tensors, batch))
    values = {name: torch.cat([part[name] for part in parts]).double().cpu().numpy() for name in parts[0]}
    return {name: np.add.reduceat(array, population.starts[:-1]) / population.sizes for name, array in values.items()}


def compute_device(name: str) -> torch.device:
    """The torch device called `name`. Raises EngineError when this installation cannot compute there."""
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise EngineError(f"cannot compute on {name!r} here: {str(error).splitlines()[0]}") from error
    return device


def _clients_at_once(model: Model, device: torch.device) -> int:
    """On a GPU the whole cohort. On a CPU as many as stay in cache.

    Networks with convolutions of some size go one client at a time, because torch vectorises them over clients as
    grouped convolutions, which are slow there; in tiny ones the cost of a call outweighs that (docs/performance.md).
    """
    if device.type != "cpu":
        return sys.maxsize
    if not any(isinstance(layer, _ConvNd) for layer in model.module.modules()):
        return 10
    return max(1, min(20, CONVOLVED_TOGETHER // model.initial.size))


def _first(active: int, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows of the first clients, of vectors (K, …); vectors that all clients share stay whole."""
    return {name: vector[:active] if vector.dim() == 2 else vector for name, vector in vectors.items()}


def _on(device: torch.device, arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}
