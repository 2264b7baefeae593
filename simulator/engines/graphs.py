"""The engine `graphs`: one client after the other on the exported graphs, as devices run them.

Graphs are loaded once, and every buffer is allocated and bound once, so a client costs only its steps, and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from device_runtime.backends import open_backend
from device_runtime.backends.backend import Executable
from device_runtime.errors import DeviceError
from device_runtime.runner import Local, PassRunner, aligned
from export.build import build_plan
from export.model import Model
from fedcore import plan as plans
from fedcore.algorithms.algorithm import Algorithm
from fedcore.checkpoint import decode_frozen
from fedcore.params import Float32, Frozen
from fedcore.release import CLIP
from fedcore.report import all_finite, clip_to
from fedcore.validation import decoder
from simulator.engines.sums import Client, RoundSums
from simulator.errors import EngineError
from simulator.population import Population


class ExportedTrip(msgspec.Struct, frozen=True):
    """A trip as a plan of its own, its graphs by name, and the blob of its frozen vectors, if it has any."""

    plan: plans.Plan
    graphs: dict[str, bytes]
    frozen: bytes = b""


Exported = list[ExportedTrip]
"""Every trip."""
EXPORTED = decoder(Exported)


def export_graphs(model: Model, algorithm: Algorithm) -> Exported:
    """Export the graphs of every trip, which takes seconds.

    Raises ExportError for a model without graphs.
    """
    plan, blobs = build_plan(model, algorithm, ("onnx",))
    return graphs_of(plan, blobs.__getitem__)


def graphs_of(plan: plans.Plan, read: Callable[[plans.BlobRef], bytes]) -> Exported:
    """The graphs of every trip of a plan that has them as ONNX. read: gives the bytes of a blob, as a bundle does."""
    frozen = b"" if plan.frozen is None else read(plan.frozen.blob)
    return [
        ExportedTrip(trip, {name: read(ref) for name, ref in trip.graphs["onnx"].items()}, frozen)
        for trip in plan.trips
    ]


class GraphsTrainer:
    """Trains one client after the other on exported graphs. Raises EngineError when they cannot be loaded here."""

    def __init__(self, exported: Exported, population: Population) -> None:
        try:
            backend = open_backend("onnxruntime")
            self._trips = [
                _TripRunner(trip, {name: backend.load(graph, name) for name, graph in trip.graphs.items()}, population)
                for trip in exported
            ]
        except DeviceError as error:
            raise EngineError(f"the engine graphs cannot run here: {error}") from error

    def train(self, number: int, broadcast: Mapping[str, Tensor], clients: Sequence[Client], sums: RoundSums) -> None:
        """Run a trip for every client: see ClientTrainer."""
        trip = plans.in_turn(self._trips, number)
        trip.receive(broadcast)
        total_S = sums.vector.numpy()
        try:
            with np.errstate(over="ignore"):  # reports that overflow are left out
                for client in clients:
                    trip.run(client, total_S)
        except DeviceError as error:
            raise EngineError(f"the engine graphs does not run this model: {error}: {error.detail}") from error


class _TripRunner:
    """The loaded graphs of a trip, and all buffers that they read and write. V: values of a report."""

    def __init__(self, trip: ExportedTrip, graphs: Mapping[str, Executable], population: Population) -> None:
        plan = trip.plan
        self._plan, self._graphs, self._starts = plan, graphs, population.starts.tolist()
        self._examples = plans.prefixed(
            plans.EXAMPLE, {item.name: population.fields[item.name] for item in plan.examples.fields}
        )
        self._received = {spec.name: aligned((spec.size,)) for spec in plan.broadcast}
        self._known = plans.prefixed(plans.BROADCAST, self._received) | plans.prefixed(plans.FROZEN, _frozen(trip))
        self._runners = [
            PassRunner(pass_plan, index, self._examples, many=plans.steps_graph(pass_plan.name) in graphs)
            for index, pass_plan in enumerate(plan.passes)
        ]
        self._values_V = aligned((sum(spec.size for spec in plan.report.means),))
        ends = np.cumsum([spec.size for spec in plan.report.means]).tolist()
        self._means = {
            spec.name: self._values_V[end - spec.size : end] for spec, end in zip(plan.report.means, ends, strict=True)
        }

    def receive(self, broadcast: Mapping[str, Tensor]) -> None:
        """Set the vectors that clients receive from now on."""
        for name, vector in self._received.items():
            np.copyto(vector, broadcast[name].numpy())

    def run(self, client: Client, total_S: NDArray[np.float64]) -> None:
        """Train one client, and add its report to the sums if it is finite once weighted."""
        rows = slice(self._starts[client.index], self._starts[client.index + 1])
        local = Local({name: array[rows] for name, array in self._examples.items()}, client.key)
        inputs: dict[str, Float32] = dict(self._known)
        metrics = []
        for pass_plan, runner in zip(self._plan.passes, self._runners, strict=True):
            runner.begin(self._graphs[plans.begin_graph(pass_plan.name)], inputs)
            swept = runner.sweep(self._graphs[plans.loop_graph(self._graphs, pass_plan.name)], inputs, local)
            inputs.update(plans.prefixed(plans.final_carry(pass_plan.name), swept.carry))
            metrics.append(swept.metrics)
        self._graphs[plans.REPORT].run(inputs, self._means)
        weight = self._plan.report.weight(local.count)
        np.multiply(self._values_V, np.float32(weight), out=self._values_V)
        sums_M = np.concatenate(metrics)
        if all_finite(self._values_V) and all_finite(sums_M):
            if self._plan.report.bounded:
                clip_to(self._values_V, float(self._received[CLIP][0]))
            reported = self._values_V.size
            total_S[:reported] += self._values_V
            total_S[reported:] += (*sums_M, weight, 1.0)
        elif self._plan.report.bounded:
            total_S[-2] += weight


def _frozen(trip: ExportedTrip) -> dict[str, Frozen]:
    """The frozen vectors, in memory that is aligned like that of the others."""
    if trip.plan.frozen is None:
        return {}
    vectors: dict[str, Frozen] = {}
    for name, vector in decode_frozen(trip.frozen, trip.plan.frozen.vectors).items():
        vectors[name] = aligned(vector.shape, vector.dtype)
        np.copyto(vectors[name], vector)
    return vectors
