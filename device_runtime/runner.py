"""The runner: it loops over batches, runs graphs and concatenates the report. It contains no algorithm.

Spec: docs/spec/plan.md. The names of graphs, inputs and outputs: fedcore/plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.backends.backend import Arrays, Executable, address
from device_runtime.errors import DeadlinePassed, NonFiniteReport, PlanRefused
from fedcore import plan as plans
from fedcore.batching import StreamKey, noise, sweeps
from fedcore.codecs import RoundKey
from fedcore.errors import ReportError
from fedcore.params import Float32, Frozen, VectorSpec
from fedcore.release import CLIP
from fedcore.report import LOSS_COUNTS, LOSSES, all_finite, count_losses, metrics_segment

ALIGNMENT = 64
# The steps of one call, if a graph takes many: enough to make the cost of the call small, and few enough to ask often
# whether to keep going.
MOST_STEPS = 64
MOST_CALL_BYTES = 2**19


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The unweighted `values` float32 (V,) of a report, its `weight`, and the number of local `examples`.

    steps: over all passes. kept: what the device keeps from then on, by name; empty for most plans. cut: texts
    among the examples that were longer than the plan's tokens.
    """

    values: Float32
    weight: float
    examples: int
    steps: int
    kept: Mapping[str, Float32] = field(default_factory=dict)
    cut: int = 0


def execute(  # noqa: PLR0913  # one for each kind of input
    plan: plans.Plan,
    graphs: dict[str, Executable],
    broadcast: Mapping[str, Float32],
    examples: Arrays,
    key: StreamKey,
    *,
    frozen: Mapping[str, Frozen] | None = None,
    kept: Mapping[str, Float32] | None = None,
    keep_going: Callable[[], bool] = lambda: True,
) -> TrainingResult:
    """Run every pass of `plan` and make the report.

    graphs: one executable for every graph name of the plan. Each is removed after its use, so that its memory is free
    before the next pass and the report need theirs.
    broadcast: the vectors of `plan.broadcast`; examples: `(n, *shape)` for every field of the plan, n at least 1.
    frozen: the vectors of `plan.frozen`, if it has any. kept: those of `plan.kept`; None before the first round, where
    a graph makes them. keep_going: called before every call of a graph of steps.
    Raises PlanRefused when the plan contradicts itself or its graphs, RuntimeFailed when a graph fails, DeadlinePassed
    when `keep_going` returns false, NonFiniteReport, which says where it began, when the report is not finite.
    """
    _check(plan)
    inputs: dict[str, NDArray[Any]] = plans.prefixed(plans.BROADCAST, broadcast) | plans.prefixed(
        plans.FROZEN, frozen or {}
    )
    first = graphs.pop(plans.FIRST_KEPT, None)
    if kept is None and first is not None:
        kept = _kept_by(first, plan, inputs)
    inputs |= plans.prefixed(plans.KEPT, kept or {})
    local = Local(plans.prefixed(plans.EXAMPLE, examples), key, keep_going)
    parts: dict[str, Float32] = {}
    steps, finite, firsts = 0, 0, list[Float32]()
    for index, pass_plan in enumerate(plan.passes):
        swept = _run_pass(pass_plan, index, graphs, inputs, local)
        firsts.append(swept.first)
        inputs.update(plans.prefixed(plans.final_carry(pass_plan.name), swept.carry))
        parts[metrics_segment(pass_plan.name)] = swept.metrics
        finite += swept.finite if finite == steps else 0
        steps += swept.steps
    if LOSS_COUNTS in plan.report.segments:
        parts[LOSSES] = count_losses(firsts[0], swept.metrics)
    means = {spec.name: aligned((spec.size,)) for spec in plan.report.means}
    graphs.pop(plans.REPORT).run(inputs, means)
    kept = _kept_by(graphs.pop(plans.NEXT_KEPT), plan, inputs) if plan.kept else {}
    weight = plan.report.weight(local.count)
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow is reported as a non-finite segment
            coded = plan.report.encode(means, RoundKey(key.seed, key.round))
            clip = float(broadcast[CLIP][0]) if plan.report.bounded else math.inf
            values = plan.report.concatenate(parts | coded, weight, clip)
    except ReportError as error:
        raise NonFiniteReport(f"{error}: {_cause(steps, finite)}") from error
    if not all(map(all_finite, kept.values())):
        raise NonFiniteReport(f"the vectors to keep are not finite: {_cause(steps, finite)}")
    return TrainingResult(values, weight, local.count, steps, kept)


def _kept_by(graph: Executable, plan: plans.Plan, inputs: Arrays) -> Mapping[str, Float32]:
    """The vectors of `plan.kept`, from one of the graphs that make them."""
    kept = {spec.name: aligned((spec.size,)) for spec in plan.kept}
    graph.run(inputs, plans.prefixed(plans.NEXT, kept))
    return kept


@dataclass(frozen=True, slots=True)
class Local:
    """The data of one client: its examples (n, …) under their names at a graph's edge, and the key of its streams.

    keep_going: called before every call of a graph of steps.
    """

    examples: Arrays
    key: StreamKey
    keep_going: Callable[[], bool] = lambda: True

    @property
    def count(self) -> int:
        """n, the number of local examples."""
        return len(next(iter(self.examples.values())))


@dataclass(frozen=True, slots=True)
class PassResult:
    """The end of a pass: its last carry, its metric sums (M,) and those of its first step, its steps, and the steps
    before a non-finite sum."""

    carry: dict[str, Float32]
    metrics: Float32
    first: Float32
    steps: int
    finite: int


class PassRunner:
    """Runs one pass over the examples of one client after the other, on buffers that it allocates once.

    pass_plan, index: the pass, and its index in the plan. examples: of any client, for dtypes and shapes. many: whether
    its graph takes many steps instead of one. Raises PlanRefused when there is no memory for the buffers.
    """

    def __init__(self, pass_plan: plans.PassPlan, index: int, examples: Arrays, *, many: bool) -> None:
        self._pass, self._index, self._many = pass_plan, index, many
        size = pass_plan.loop.batch_size
        self._most = _steps_of_a_call(size, examples) if many else 1
        lead = (self._most, size)
        self._batch = {name: aligned((*lead, *array.shape[1:]), array.dtype) for name, array in examples.items()}
        self._mask, self._noise = aligned(lead), aligned(lead, np.int32)
        self._metrics = aligned((self._most, len(pass_plan.metrics)))
        # The carry lives in two sets of buffers, read and written in turns: a graph must not write what it reads.
        self._carries = [{spec.name: aligned((spec.size,)) for spec in pass_plan.carry} for _ in range(2)]
        self._views: dict[int, tuple[dict[str, NDArray[Any]], Arrays]] = {}

    def begin(self, graph: Executable, inputs: Arrays) -> None:
        """Run the begin graph. inputs: the broadcast and the last carries of earlier passes, by names at the edge."""
        graph.run(inputs, plans.prefixed(plans.NEXT, self._carries[0]))

    def sweep(self, step: Executable, inputs: Arrays, local: Local) -> PassResult:
        """Run the graph of steps for all batches. The next `begin` overwrites the carry of the result.

        Raises DeadlinePassed when the client must stop.
        """
        pass_plan, steps, finite, now, after = self._pass, 0, 0, *self._carries
        totals, calls = np.zeros(len(pass_plan.metrics)), dict[tuple[int, bool], tuple[Arrays, Arrays]]()
        first = np.zeros(len(totals), np.float32)
        for indices, real in self._calls(local):
            if not local.keep_going():
                raise DeadlinePassed(
                    f"stopped in pass {pass_plan.name!r} after {steps} steps: the report would come too late"
                )
            count = len(indices)
            self._fill(indices, real, local, steps)
            call = count, now is self._carries[0]
            if call not in calls:
                calls[call] = self._edge(inputs, now, after, count)
            step.run(*calls[call])
            sums = self._metrics[:count]
            totals = np.vstack((totals, sums)).cumsum(axis=0)[-1]  # one by one, for any steps in a call
            if not steps:
                first = sums[0].copy()
            if finite == steps:
                finite += int(np.isfinite(sums).all(axis=1).cumprod().sum())
            steps += count
            now, after = after, now
        with np.errstate(over="ignore"):
            return PassResult(now, totals.astype(np.float32), first, steps, finite)

    def _calls(self, local: Local) -> Iterator[tuple[NDArray[np.int64], Float32]]:
        """The indices (S, B) and masks (S, B) of every call; its steps are within one sweep."""
        for indices, real in sweeps(self._pass.loop, local.count, local.key, self._index):
            for start in range(0, len(indices), self._most):
                steps = slice(start, start + self._most)
                yield indices[steps], real[steps]

    def _fill(self, indices: NDArray[np.int64], real: Float32, local: Local, first: int) -> None:
        """Copy the examples, masks and noise of the steps from `first` on into the buffers."""
        count, size = indices.shape
        for name, array in local.examples.items():
            array.take(indices, axis=0, out=self._batch[name][:count], mode="clip")  # any other mode copies twice
        np.copyto(self._mask[:count], real)
        if self._pass.noise:
            for place in range(count):
                np.copyto(self._noise[place], noise(local.key, self._index, first + place, size))

    def _edge(self, inputs: Arrays, now: Arrays, after: Arrays, count: int) -> tuple[Arrays, Arrays]:
        """The inputs and outputs of a call with `count` steps. Equal counts get the same views, which engines cache."""
        if count not in self._views:
            part: Any = slice(count) if self._many else 0
            buffers = {**self._batch, plans.MASK: self._mask, plans.NOISE: self._noise}
            fed = {name: array[part] for name, array in buffers.items()}
            self._views[count] = fed, {plans.METRICS: self._metrics[part]}
        fed, sums = self._views[count]
        return {**inputs, **fed, **plans.prefixed(plans.CARRY, now)}, {**plans.prefixed(plans.NEXT, after), **sums}


def steps_of(inputs: Arrays) -> int:
    """The number of steps of one call with these inputs; 1 without an axis of steps."""
    mask = inputs.get(plans.MASK)
    return len(mask) if mask is not None and mask.ndim == 2 else 1  # steps, and examples of each


def _steps_of_a_call(size: int, examples: Arrays) -> int:
    """The most steps of one call, with batches of `size`."""
    fields_bytes = sum(math.prod(array.shape[1:]) * array.itemsize for array in examples.values())
    mask_bytes = noise_bytes = np.dtype(np.float32).itemsize
    return max(1, min(MOST_STEPS, MOST_CALL_BYTES // (size * (fields_bytes + mask_bytes + noise_bytes))))


def _run_pass(
    pass_plan: plans.PassPlan, index: int, graphs: dict[str, Executable], inputs: Arrays, local: Local
) -> PassResult:
    """Run a pass. Afterwards its graphs and buffers are free, except the last carry."""
    runner = PassRunner(pass_plan, index, local.examples, many=plans.steps_graph(pass_plan.name) in graphs)
    runner.begin(graphs.pop(plans.begin_graph(pass_plan.name)), inputs)
    return runner.sweep(graphs.pop(plans.loop_graph(graphs, pass_plan.name)), inputs, local)


def _cause(steps: int, finite: int) -> str:
    """The reason for a report that is not finite, after `finite` steps with a finite loss. Examples are finite."""
    if finite == 0:
        return "the loss was not finite in the first step, before any training here, though the examples are"
    if finite == 1 < steps:
        return "after one step the loss was not finite: the gradient is not, or the learning rate is far too large"
    if finite < steps:
        return "the loss left the finite numbers in later steps: training diverged, a lower client_lr is the remedy"
    return "every loss was finite: the last gradient is not, or training diverged in the last step"


def _check(plan: plans.Plan) -> None:
    """Refuse a plan whose report cannot be filled from its passes."""
    if not plan.examples.fields:
        raise PlanRefused(f"plan {plan.name!r} names no example field, so there is nothing to count")
    if plan.report.bounded and VectorSpec(CLIP, 1) not in plan.broadcast:
        raise PlanRefused(f"plan {plan.name!r} bounds the report, and its broadcast has no {CLIP!r}: the bound")
    sums = {metrics_segment(pass_plan.name): len(pass_plan.metrics) for pass_plan in plan.passes}
    if LOSS_COUNTS in plan.report.segments and min(sums.values(), default=0) >= 2:  # examples and loss
        sums[LOSSES] = LOSS_COUNTS.size
    for segment in plan.report.unweighted:
        if segment.reduction == "sum" and sums.get(segment.name) != segment.size:
            raise PlanRefused(
                f"plan {plan.name!r} wants {segment.size} sums in segment {segment.name!r}; its passes make {sums}"
            )


def aligned(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """An uninitialised array whose memory begins at a multiple of 64 bytes, as engines' own arrays do.

    The alignment decides which values vector instructions add first, and so how a sum is rounded.
    Raises PlanRefused when there is no memory for it.
    """
    try:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = np.empty(size + ALIGNMENT, np.uint8)
        start = -address(memory) % ALIGNMENT
        array: NDArray[Any] = memory[start : start + size].view(dtype).reshape(shape)
    except (MemoryError, ValueError) as error:
        raise PlanRefused(f"the plan asks for a buffer of {list(shape)}: {error}") from error
    return array
