"""The engine `torch`: clients vectorised together, on the algorithm's own functions and the model's own operators.

Shapes: K clients, A of them active, D parameters, B batch, M metric sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from export.model import Model
from fedcore.algorithms.algorithm import (
    Algorithm,
    Broadcast,
    Carry,
    Pass,
    Trip,
    keeps_client_state,
    trips_of,
    with_carries,
)
from fedcore.batching import noise, sweeps
from fedcore.params import Float32
from fedcore.plan import EXAMPLE, MASK, METRICS, NEXT, NOISE, REPORT, prefixed, unprefixed
from fedcore.release import CLIP
from fedcore.report import weight_of
from fedcore.schedule import Loop
from simulator.engines.memory import ClientStates, Examples, single_precision
from simulator.engines.oracle import CohortMeasure, CohortOracle, NotAffine, one_step
from simulator.engines.recorded.program import Programs, padded
from simulator.engines.sums import Client, RoundSums
from simulator.errors import EngineError
from simulator.population import Population

KEPT = "kept"
# The most parameters that are vectorised together in networks with convolutions.
CONVOLVED_TOGETHER = 1_000_000
# The number of vectors per client that a GPU's memory must hold: parameters, gradients, activations.
VECTORS = 32
# The clients that are vectorised together on a CPU, so that all their parameters stay in cache from step to step. If
# none takes more than BRIEF steps, more clients share the cost of calls, if a block of the cohort has as many.
TOGETHER, BRIEFLY, BRIEF = 10, 20, 2
# The most sizes of batches on a CPU: padding beyond the next size is left out.
BATCH_SIZES = 8


class VectorisedTrainer:
    """Trains several clients together on one compute device.

    client_states: what clients keep between rounds; moved to the device. programs: choose the device and whether steps
    are captured. at_once: the number of clients that train together, by the number of steps they take.
    """

    def __init__(
        self,
        model: Model,
        algorithm: Algorithm,
        population: Population,
        client_states: ClientStates,
        *,
        programs: Programs,
        at_once: Callable[[int], int],
    ) -> None:
        self._model, self._algorithm, self._kept = model, algorithm, client_states
        forward = any(item.forward for trip in trips_of(algorithm) for item in trip.passes)
        self._evaluating = model.evaluating() if forward else model
        self._device, self._at_once, self._programs = programs.device, at_once, programs
        self._examples, self._sizes = Examples(programs.device, population), population.sizes.tolist()

    @single_precision()
    def train(self, number: int, broadcast: Mapping[str, Tensor], clients: Sequence[Client], sums: RoundSums) -> None:
        """Run a trip for every client: see ClientTrainer."""
        turn = (number - 1) % len(trips_of(self._algorithm))
        received = self._programs.hold((turn,), broadcast)
        for together in self._groups(turn, clients):
            try:
                self._train(turn, received, _Group(together, *self._examples.of(_indices(together))), sums)
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"the memory of {self._device} is too small for {len(together)} clients at once; train fewer with "
                    "--at-once"
                ) from error

    def _groups(self, turn: int, clients: Sequence[Client]) -> Iterator[Sequence[Client]]:
        """Clients that train together. The first and longest client of a group determines the group's size."""
        loops = [item.loop for item in trips_of(self._algorithm)[turn].passes]
        start = 0
        while start < len(clients):
            size = self._sizes[clients[start].index]
            end = start + self._at_once(max(loop.step_count(size) for loop in loops))
            yield clients[start:end]
            start = end

    def _train(self, turn: int, received: Broadcast, group: _Group, sums: RoundSums) -> None:
        if self._in_one_step(turn, received, group, sums):
            return
        indices, trip = _indices(group.clients), trips_of(self._algorithm)[turn]
        inputs = {**received, **self._programs.hold((turn, KEPT), self._kept.gather(indices))}
        carries: dict[str, Carry] = {}
        metrics: dict[str, Tensor] = {}
        for index, item in enumerate(trip.passes):
            carried = with_carries(inputs, carries)
            carries[item.name], metrics[item.name] = self._run_pass((turn, index), item, carried, group)
        end = functools.partial(self._end, trip, inputs, carries)
        arguments = [*inputs.values(), *(vector for carry in carries.values() for vector in carry.values())]
        ended = self._programs.run((turn, len(indices)), end, arguments, {})
        report, new_state = unprefixed(REPORT, ended), unprefixed(KEPT, ended)
        finite = sums.add(report, metrics, self._weights(indices), new_state, received.get(CLIP))
        self._kept.scatter(indices, new_state, finite)

    def _in_one_step(self, turn: int, received: Broadcast, group: _Group, sums: RoundSums) -> bool:
        """Train clients by one gradient of all their losses, if each takes one step and all reports are finite.

        Returns whether it did.
        """
        trip = trips_of(self._algorithm)[turn]
        loops = [item.loop for item in trip.passes]
        few = len(loops) == 1 and not trip.passes[0].forward
        few = few and all(loops[0].step_count(self._sizes[client.index]) == 1 for client in group.clients)
        if not few or len(group.clients) == 1 or not sums.layout.adds_up or keeps_client_state(self._algorithm):
            return False
        ((_, rows, mask),) = self._steps(0, trip.passes[0], group)
        weight_K = self._weights(_indices(group.clients))
        try:
            step = one_step(trip, received, mask.sum(1, keepdim=True))
            gradient_weight_K = step.gradient_weights(weight_K)
        except NotAffine:
            return False
        where = (turn, "one step")
        edge = self._batch((turn, 0, 0), group, rows, mask)
        inputs = self._programs.hold((*where, *mask.shape), {"point": step.point, "weight": gradient_weight_K})
        gradient = functools.partial(self._weighted_gradient, inputs, edge)
        outputs = self._programs.run((*where, *mask.shape), gradient, [*inputs.values(), *edge.values()], {})
        summed = step.sums(outputs["gradient"], weight_K)
        return sums.add_summed(summed, {trip.passes[0].name: outputs[METRICS]}, weight_K)

    def _weighted_gradient(self, inputs: Mapping[str, Tensor], edge: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weighted sum of the gradients of clients at one point, and their metric sums."""
        oracle = CohortOracle(self._model, unprefixed(EXAMPLE, edge), edge[MASK], edge.get(NOISE))
        return {"gradient": oracle.weighted(inputs["point"], inputs["weight"]), METRICS: oracle.sums_KM}

    def _run_pass(self, where: tuple[int, int], item: Pass, received: Broadcast, group: _Group) -> tuple[Carry, Tensor]:
        """The last carry (K, …) and the metric sums (K, M) of every client. where: indices of trip and pass."""
        clients = group.clients
        # Vectors that all clients share stay single, so the first step multiplies the examples of all by one matrix.
        carry = self._programs.hold((*where, "begin"), item.begin(received))
        rows = {
            name: self._programs.memory((*where, NEXT, name), (len(clients), vector.shape[-1]))
            for name, vector in carry.items()
        }
        sums_KM = torch.zeros(len(clients), len(self._model.metrics), device=self._device)
        for number, (active, examples, mask) in enumerate(self._steps(where[1], item, group)):
            trained = len(mask)
            edge = self._batch((*where, number), group, examples, mask)
            key = (*where, *mask.shape, number == 0)
            step = self._programs.once(key, functools.partial(self._bind, key, item, carry, received, edge, rows))
            ended = {name: vector[active:trained].clone() for name, vector in rows.items() if trained > active}
            sums_KM[:active] += step()[METRICS][:active]
            for name, vector in ended.items():  # clients without a batch left keep their last carry
                rows[name][active:trained] = vector
            carry = rows
        return carry, sums_KM

    def _bind(
        self,
        key: Hashable,
        item: Pass,
        carry: Carry,
        received: Broadcast,
        edge: Mapping[str, Tensor],
        rows: Carry,
    ) -> Callable[[], dict[str, Tensor]]:
        """A step of these clients, which stays valid until their memory moves."""
        trained = len(edge[MASK])
        step = functools.partial(self._step, item, _first(trained, carry), _first(trained, received), edge)
        arguments = [*carry.values(), *received.values(), *edge.values()]
        return functools.partial(self._programs.run, key, step, arguments, prefixed(NEXT, _first(trained, rows)))

    def _step(self, item: Pass, carry: Carry, received: Broadcast, edge: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One step of the active clients: names as at the edge of a step graph, `edge` without vectors."""
        batch = unprefixed(EXAMPLE, edge)
        oracle: CohortMeasure | CohortOracle
        if item.forward:
            oracle = CohortMeasure(self._evaluating, batch, edge[MASK])
        else:
            oracle = CohortOracle(self._model, batch, edge[MASK], edge.get(NOISE))
        after = item.step(carry, received, oracle)
        return prefixed(NEXT, {name: _rows(vector, len(edge[MASK])) for name, vector in after.items()}) | {
            METRICS: oracle.sums_KM
        }

    def _end(self, trip: Trip, inputs: Broadcast, carries: Mapping[str, Carry]) -> dict[str, Tensor]:
        """The reports and the kept states of clients."""
        client_state = self._algorithm.keep(inputs, carries) if keeps_client_state(self._algorithm) else {}
        return prefixed(REPORT, trip.report(inputs, carries)) | prefixed(KEPT, client_state)

    def _batch(self, at: tuple[int, int, int], group: _Group, rows: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Examples, mask and noise of a step, in separate memory. at: indices of trip, pass and step."""
        where, step = at[:2], at[2]
        room = functools.partial(self._room, where, group, *rows.shape)
        edge = self._programs.once((*where, "batch", rows.shape), room)
        edge[MASK].copy_(mask)
        for name, array in group.fields.items():
            torch.index_select(array, 0, rows.flatten(), out=edge[f"{EXAMPLE}.{name}"].flatten(0, 1))
        if self._model.noisy:  # from which dropout draws
            values = np.stack(
                [noise(client.key, where[1], step, rows.shape[1]) for client in group.clients[: len(mask)]]
            )
            edge[NOISE].copy_(torch.from_numpy(values))
        return edge

    def _room(self, where: tuple[int, int], group: _Group, trained: int, size: int) -> dict[str, Tensor]:
        """Memory for a batch of `size` examples of each client that a step trains."""
        room = {MASK: self._programs.memory((*where, size, MASK), (trained, size))}
        for name, array in group.fields.items():
            shape = (trained, size, *array.shape[1:])
            room[f"{EXAMPLE}.{name}"] = self._programs.memory((*where, size, EXAMPLE, name), shape, array.dtype)
        if self._model.noisy:
            room[NOISE] = self._programs.memory((*where, size, NOISE), (trained, size), torch.int32)
        return room

    def _steps(self, index: int, item: Pass, group: _Group) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each step, the number of clients with a batch, and rows into the group's examples and masks, both (A, B).

        A is that number, or a little more if steps are captured. B is the size of a batch; on a CPU, while all clients
        still have a batch, only the filled part of it, rounded up to one of BATCH_SIZES.
        """
        clients = group.clients
        counts = [item.loop.step_count(self._sizes[client.index]) for client in clients]
        rows_SKB, mask_SKB = self._rows(index, item.loop, group, counts[0])
        rows, masks = (torch.from_numpy(array).to(self._device) for array in (rows_SKB, mask_SKB))
        real_SK, whole = mask_SKB.sum(2), item.loop.batch_size
        # The granularity, in examples, to which batches are cut to real ones: each size has its own recording.
        every = -(-whole // BATCH_SIZES) if self._device.type == "cpu" else whole
        for step in range(counts[0]):
            active = sum(count > step for count in counts)
            trained = padded(active, len(clients)) if self._programs.captured else active
            size = whole
            if active == len(clients):  # else there would be a recording for every number of clients and every size
                size = min(whole, -(-int(real_SK[step].max()) // every) * every)
            yield active, rows[step, :trained, :size], masks[step, :trained, :size]

    def _rows(self, index: int, loop: Loop, group: _Group, steps: int) -> tuple[NDArray[np.int64], Float32]:
        """Rows into the group's examples, and masks, for each step."""
        shape = (steps, len(group.clients), loop.batch_size)
        sizes = [self._sizes[client.index] for client in group.clients]
        if max(sizes) <= loop.batch_size and not self._model.noisy:
            # All batches of a client hold all of its examples, whose order matters to nothing but round-off then.
            mask_KB = np.arange(loop.batch_size) < np.array(sizes)[:, None]
            rows_KB = np.array(group.starts)[:, None] + mask_KB * np.arange(loop.batch_size)
            return np.broadcast_to(rows_KB, shape).copy(), np.broadcast_to(mask_KB, shape).astype(np.float32)
        rows_SKB, mask_SKB = np.zeros(shape, np.int64), np.ones(shape, np.float32)
        for place, (client, size) in enumerate(zip(group.clients, sizes, strict=True)):
            step = 0
            for indices, mask in sweeps(loop, size, client.key, index):
                rows_SKB[step : step + len(indices), place] = group.starts[place] + indices
                mask_SKB[step : step + len(indices), place] = mask
                step += len(indices)
        return rows_SKB, mask_SKB

    def _weights(self, clients: Sequence[int]) -> Tensor:
        weights = [weight_of(self._algorithm.weighting, self._sizes[client]) for client in clients]
        return torch.from_numpy(np.array(weights, np.float32)).to(self._device)


@dataclass(frozen=True, slots=True)
class _Group:
    """Clients that train together, longest first; `fields` has their examples, each client's beginning at `starts`."""

    clients: Sequence[Client]
    fields: Mapping[str, Tensor]
    starts: Sequence[int]


def _indices(clients: Sequence[Client]) -> list[int]:
    return [client.index for client in clients]


def clients_at_once(model: Model, device: torch.device, steps: int | None = None) -> int:
    """The number of clients to vectorise together: on a GPU as many as fit, on a CPU as many as stay in cache.

    steps: the most of a client, if known.

    Networks with larger convolutions train one client at a time, because torch vectorises them over clients as slow
    grouped convolutions. In tiny ones the cost of a call outweighs that (docs/performance.md).
    """
    if device.type != "cpu":
        memory = torch.cuda.get_device_properties(device).total_memory
        return max(1, memory // (VECTORS * 4 * model.initial.size))
    if not any(isinstance(layer, _ConvNd) for layer in model.module.modules()):
        return BRIEFLY if steps is not None and steps <= BRIEF else TOGETHER
    return max(1, min(20, CONVOLVED_TOGETHER // model.initial.size))


def _first(active: int, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows of the first clients, of vectors (K, …); vectors that all clients share stay whole."""
    return {name: vector[:active] if vector.dim() == 2 else vector for name, vector in vectors.items()}


def _rows(vector: Tensor, clients: int) -> Tensor:
    """A vector as (K, …), even if all clients share it."""
    return vector.expand(clients, vector.shape[-1])
