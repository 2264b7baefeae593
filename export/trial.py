"""A trial: the same steps of training on every runtime, and the distance between two outcomes."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from device_runtime.backends.backend import Executable
from export.errors import DynamicControlFlow, ExportError, InvalidModel, reason
from export.model import Model, copied, oracle_of
from export.trial_examples import draw_examples, fixed_batch, put_ends
from fedcore import plan as plans
from fedcore.algorithms.algorithm import Algorithm, Trip, keeps_client_state, trips_of, with_carries
from fedcore.algorithms.facts import for_model
from fedcore.params import Float32
from fedcore.plan import PassPlan, Plan

STEPS = 3
FEW_STEPS = 2
"""The steps of one call of a graph of many, so that a trial has several calls with several steps each."""
ROOM = 2**26
"""The most bytes of models kept after each step of a pass with a fixed number of steps; larger models take fewer."""
TOLERANCE = 1e-5
TINY = 1e-30
ROUND_OFF = float(np.finfo(np.float32).eps)
Arrays = dict[str, np.ndarray]
Shake = Callable[[torch.Tensor], torch.Tensor]


def worst(distances: Iterable[float]) -> float:
    """The largest; not a number if any is."""
    values = list(distances)
    return math.nan if any(map(math.isnan, values)) else max(values)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input: fields (B, …), mask float32 (B,), noise int32 (B,)."""

    fields: Arrays
    mask: Float32
    noise: np.ndarray

    @property
    def real(self) -> Batch:
        """Only the rows that the mask keeps."""
        rows = self.mask > 0
        return Batch({name: field[rows] for name, field in self.fields.items()}, self.mask[rows], self.noise[rows])


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial: by pass, the carry after every step with its metric sums; and by graph, what else there
    is at the end: the report, and what the device keeps.
    """

    trails: dict[str, list[Arrays]]
    ends: dict[str, Arrays]

    def last(self, name: str) -> Arrays:
        """The last carry of a pass, with the metrics of all its steps."""
        sums = np.sum([carry[plans.METRICS] for carry in self.trails[name]], axis=0)
        return self.trails[name][-1] | {plans.METRICS: sums}

    def start_of(self, name: str, number: int) -> Arrays:
        """The carry from which step `number` (from 1) of a pass starts if this outcome guides it."""
        trail = self.trails[name]
        return _vectors_of(trail[(number - 1) % len(trail)])


@dataclass(frozen=True, slots=True)
class Trial:
    """The same work of a trip for every runtime: broadcast vectors, those that the device keeps, and the batches of
    every pass.
    """

    model: Model
    trip: Trip
    broadcast: Arrays
    kept: Arrays
    batches: dict[str, list[Batch]]

    @classmethod
    def draw(
        cls,
        model: Model,
        algorithm: Algorithm,
        steps: int = STEPS,
        real: int | None = None,
        *,
        trip_index: int = 0,
        seed: int = 0,
    ) -> Trial:
        """Random batches and the initial model. All other vectors are moved off zero, as zeros could hide a term.

        Among the examples are the ends of integers' ranges, unless the ModelSpec makes them.
        A pass takes `steps` steps, or more if its loop fixes more, because a step may depend on the number before it.
        real: the number of examples of every batch that the mask keeps; if None all, and half of the last batch.
        trip_index: the index of the algorithm's trip, from 0. seed: of the examples.
        """
        random, algorithm = np.random.default_rng(seed), for_model(algorithm, model.metrics[1:], model.schema)
        state, trip = algorithm.init(torch.from_numpy(model.initial)), trips_of(algorithm)[trip_index]
        broadcast = {name: vector.numpy().copy() for name, vector in trip.broadcast(state).items()}
        first = trip.init_client(torch.from_numpy(model.initial)) if keeps_client_state(trip) else {}
        kept = {name: vector.numpy().copy() for name, vector in first.items()}
        for name, vector in (broadcast | kept).items():
            if name != plans.PARAMS:
                np.add(vector, np.abs(random.normal(0, 0.01, vector.shape)), out=vector, casting="same_kind")
        batches = {}
        for item in trip.passes:
            size = item.loop.batch_size
            fixed = min(item.loop.steps or 0, ROOM // model.initial.nbytes)
            real_counts = [real or size] * (max(steps, fixed) - 1) + [real or (size + 1) // 2]
            batches[item.name] = [_batch(model, size, count, random) for count in real_counts]
            if model.spec.examples is None:
                put_ends(model.spec.fields, [batch.fields for batch in batches[item.name]], random)
        return cls(model, trip, broadcast, kept, batches)

    def steps(self, graph: str) -> int:
        """The steps after which a graph is compared; for the report, those of all passes."""
        by_graph = {plans.step_graph(name): len(batches) for name, batches in self.batches.items()}
        return by_graph.get(graph, sum(by_graph.values()))

    def reference(
        self, dtype: torch.dtype = torch.float32, guide: TrialOutcome | None = None, shake: Shake | None = None
    ) -> TrialOutcome:
        """The outcome in torch, with no rewriting by the exporter except dropout, and only on real examples.

        guide: an outcome; every step but the first starts from its carries instead of its own. If there are more steps
        than it has, they start from its first again. shake: changes what gradients are taken at: parameters, frozen
        vectors and fields.
        Raises InvalidModel when the model does not run in `dtype`.
        """
        try:
            with in_type(self.model, dtype) as model:
                return self._reference(model, dtype, guide, shake)
        except ExportError:
            raise
        except Exception as error:  # whatever the user's own code raises
            if fixed := fixed_batch(self.model):
                raise DynamicControlFlow(fixed) from error
            raise InvalidModel(
                f"the model does not run on random examples in {dtype}: {reason(error)}; does the `high` of every "
                "integer field fit the model? Inputs with a domain of their own come from the ModelSpec's `examples`"
            ) from error

    def _reference(
        self, model: Model, dtype: torch.dtype, guide: TrialOutcome | None, shake: Shake | None
    ) -> TrialOutcome:
        broadcast = tensors_of(self.broadcast | self.kept, dtype)
        trails: dict[str, list[Arrays]] = {}
        last: dict[str, dict[str, torch.Tensor]] = {}
        measured = model.evaluating() if any(item.forward for item in self.trip.passes) else model
        for item in self.trip.passes:
            received = with_carries(broadcast, last)
            carry, trails[item.name] = item.begin(received), []
            for number, batch in enumerate(self.batches[item.name]):
                if guide and number:
                    carry = tensors_of(guide.start_of(item.name, number), dtype)
                fields, mask = tensors_of(batch.real.fields, dtype), torch.from_numpy(batch.real.mask).to(dtype)
                run = measured if item.forward else model
                if shake:
                    fields, run = _shaken(fields, shake), run.with_frozen(_shaken(run.frozen, shake))
                oracle = oracle_of(item, run, fields, mask, torch.from_numpy(batch.real.noise))
                carry = item.step(carry, received, functools.partial(_at_shaken, oracle, shake) if shake else oracle)
                trails[item.name].append(_arrays(carry | {plans.METRICS: oracle.sums}))
            last[item.name] = tensors_of(_vectors_of((guide.trails if guide else trails)[item.name][-1]), dtype)
        ends = {plans.REPORT: self.trip.report(broadcast, last)}
        if keeps_client_state(self.trip):
            ends |= {
                plans.FIRST_KEPT: self.trip.init_client(broadcast[plans.PARAMS]),
                plans.NEXT_KEPT: self.trip.keep(broadcast, last),
            }
        return TrialOutcome(trails, {graph: _arrays(vectors) for graph, vectors in ends.items()})

    def exported(self, plan: Plan, graphs: Mapping[str, Executable], guide: TrialOutcome | None = None) -> TrialOutcome:
        """The outcome of exported graphs; guide: as in `reference`."""
        received, trails = (
            plans.prefixed(plans.BROADCAST, self.broadcast) | plans.prefixed(plans.FROZEN, self.model.frozen_vectors),
            {},
        )
        received |= plans.prefixed(plans.KEPT, self.kept)
        for pass_plan in plan.passes:
            trails[pass_plan.name] = self._exported_pass(pass_plan, graphs, received, guide)
            last = (guide.trails if guide else trails)[pass_plan.name][-1]
            received |= plans.prefixed(plans.final_carry(pass_plan.name), _vectors_of(last))
        ends = {plans.REPORT: _empty({spec.name: spec.size for spec in plan.report.means})}
        graphs[plans.REPORT].run(received, ends[plans.REPORT])
        for graph in (plans.FIRST_KEPT, plans.NEXT_KEPT) if plan.kept else ():
            ends[graph] = _empty({spec.name: spec.size for spec in plan.kept})
            graphs[graph].run(received, plans.prefixed(plans.NEXT, ends[graph]))
        return TrialOutcome(trails, ends)

    def _exported_pass(
        self, pass_plan: PassPlan, graphs: Mapping[str, Executable], received: Arrays, guide: TrialOutcome | None
    ) -> list[Arrays]:
        sizes, batches = {spec.name: spec.size for spec in pass_plan.carry}, self.batches[pass_plan.name]
        carry, trail = _empty(sizes), []
        graphs[plans.begin_graph(pass_plan.name)].run(received, plans.prefixed(plans.NEXT, carry))
        many = plans.steps_graph(pass_plan.name) in graphs
        count = FEW_STEPS if many and guide is None else 1
        for number, chunk in enumerate(batches[at : at + count] for at in range(0, len(batches), count)):
            if guide and number:
                carry = guide.start_of(pass_plan.name, number)
            after, metrics = _empty(sizes), np.empty((len(chunk), len(pass_plan.metrics)), np.float32)
            stacked = [_edge(batch) for batch in chunk]
            fed = {name: np.stack([batch[name] for batch in stacked]) for name in stacked[0]} if many else stacked[0]
            inputs = received | plans.prefixed(plans.CARRY, carry) | fed
            outputs = plans.prefixed(plans.NEXT, after) | {plans.METRICS: metrics if many else metrics[0]}
            graphs[plans.loop_graph(graphs, pass_plan.name)].run(inputs, outputs)
            carry = after
            trail.append(after | {plans.METRICS: metrics.sum(axis=0)})
        return trail

    def distances(
        self,
        actual: TrialOutcome,
        expected: TrialOutcome,
        guide: TrialOutcome | None = None,
        over: Callable[[Iterable[float]], float] = worst,
        *,
        by_tensor: bool = True,
    ) -> dict[str, float]:
        """By graph, the distance from the expected outcome: after all steps, or after each, combined by `over`.

        guide: the guide of both outcomes, if any; then distances are after each step. The worst vector counts, with
        by_tensor the worst tensor of the model in it.
        """
        distance = functools.partial(self._distance, by_tensor=by_tensor)
        received = tensors_of(self.broadcast | self.kept, torch.float32)
        apart = {}
        for item in self.trip.passes:
            start = _arrays(item.begin(received))
            last = tensors_of(_vectors_of((guide or expected).trails[item.name][-1]), torch.float32)
            received = with_carries(received, {item.name: last})
            if guide is None:
                apart[plans.step_graph(item.name)] = distance(actual.last(item.name), expected.last(item.name), start)
            else:
                ours, theirs = actual.trails[item.name], expected.trails[item.name]
                starts = [start, *(guide.start_of(item.name, number) for number in range(1, len(theirs)))]
                apart[plans.step_graph(item.name)] = over(map(distance, ours, theirs, starts))
        return apart | {graph: distance(actual.ends[graph], vectors, {}) for graph, vectors in expected.ends.items()}

    def _distance(self, actual: Arrays, expected: Arrays, start: Arrays, *, by_tensor: bool) -> float:
        """The worst l2 difference of any part of any vector, over how far that part moved.

        It moved from `start`, or from zero if absent there. The denominator has two more terms. The first makes one
        float32 rounding error of the model's part count as the tolerance, because a difference of two models loses
        digits. The second is a hundredth of the whole vector's movement, because a single tensor's gradient can be zero
        up to rounding. Not a number if any is.
        """
        apart = []
        for name, vector in expected.items():
            change = vector.astype(np.float64) - start.get(name, 0.0)
            error = actual[name].astype(np.float64) - vector
            whole = _norm(change)
            # The size of metric sums is unrelated to the model's.
            model = self.broadcast["params"] * (name != plans.METRICS)
            cuts: Sequence[int] = self._cuts if by_tensor and vector.size == model.size else []
            for error_t, change_t, model_t in zip(*(np.split(v, cuts) for v in (error, change, model)), strict=True):
                floor = ROUND_OFF / TOLERANCE * _norm(model_t) + 0.01 * whole
                apart.append(_norm(error_t) / max(_norm(change_t) + floor, TINY))
        return worst(apart)

    @property
    def _cuts(self) -> list[int]:
        """The indices between the model's tensors in a vector (D,)."""
        return list(itertools.accumulate(spec.size for spec in self.model.schema.tensors[:-1]))


@contextlib.contextmanager
def in_type(model: Model, dtype: torch.dtype) -> Iterator[Model]:
    """The model during a block in which it computes in float32, or in float64."""
    if dtype == torch.float32:
        yield model
        return
    other = copy.copy(model)
    other.module = copied(model.module).to(dtype)
    with _Widened():
        yield other


class _Widened(TorchFunctionMode):
    """Turns float32 that a model's own code requests into float64."""

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widened(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.double()
    return torch.float64 if value is torch.float32 else value


def _shaken(tensors: Mapping[str, torch.Tensor], shake: Shake) -> dict[str, torch.Tensor]:
    return {name: shake(tensor) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _at_shaken(oracle: Callable[[torch.Tensor], Any], shake: Shake, params_D: torch.Tensor) -> Any:
    return oracle(shake(params_D))


def _norm(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))


def _batch(model: Model, size: int, real: int, random: np.random.Generator) -> Batch:
    mask = (np.arange(size) < real).astype(np.float32)
    return Batch(draw_examples(model.spec, size, random), mask, random.integers(-(2**31), 2**31, size).astype(np.int32))


def _edge(batch: Batch) -> Arrays:
    """A batch under the names at the edge of a graph."""
    return plans.prefixed(plans.EXAMPLE, batch.fields) | {plans.MASK: batch.mask, plans.NOISE: batch.noise}


def _empty(sizes: Mapping[str, int]) -> Arrays:
    return {name: np.empty(size, np.float32) for name, size in sizes.items()}


def _vectors_of(carry: Arrays) -> Arrays:
    return {name: value for name, value in carry.items() if name != plans.METRICS}


def tensors_of(values: Arrays, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors; those of floats in `dtype`."""
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _arrays(values: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: value.detach().numpy() for name, value in values.items()}
