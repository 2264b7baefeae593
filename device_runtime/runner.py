"""Run a plan over local examples: loop over batches, run graphs, concatenate the report. No algorithm lives here.

Spec: docs/spec/plan.md. Names at the edge of a graph, all vectors float32 (size,):

    <pass>.begin   broadcast.<name>                                            → next.<name>
    <pass>.step    carry.<name>, broadcast.<name>, example.<field> (B, …),
                   mask float32 (B,)[, noise int32 (B,)]                       → next.<name>, metrics float32 (M,)
    report         broadcast.<name>, <pass>.carry.<name>                       → one output per mean segment, its name

`metrics` are sums over the batch under its mask, in the order of the pass's `metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.backends.backend import Arrays, Executable
from device_runtime.errors import DeadlinePassed, NonFiniteReport, PlanRefused
from fedcore.batching import Place, batches, noise
from fedcore.errors import ReportError
from fedcore.params import Float32
from fedcore.plan import PassPlan, Plan
from fedcore.report import WEIGHT


@dataclass(frozen=True, slots=True)
class Result:
    """What the work came to: `report` float32 (L,), from so many local `examples`, in so many `steps` of all passes."""

    report: Float32
    examples: int
    steps: int


def execute(
    plan: Plan,
    graphs: dict[str, Executable],
    broadcast: Mapping[str, Float32],
    examples: Arrays,
    place: Place,
    *,
    keep_going: Callable[[], bool] = lambda: True,
) -> Result:
    """Run every pass of `plan` and make the report.

    graphs: one executable for every graph name of the plan. Each is taken out when its work is done, so that its memory
    is free again before the next pass and the report ask for theirs.
    broadcast: the vectors of `plan.broadcast`; examples: `(n, *shape)` for every field of the plan, n at least 1.
    keep_going: asked before every step.
    Raises PlanRefused when the plan contradicts itself or its graphs, RuntimeFailed when a graph fails, DeadlinePassed
    when `keep_going` says no, NonFiniteReport, which says where it began, when the report is not finite.
    """
    _check(plan)
    work = _Work(graphs, _under("broadcast", broadcast), _under("example", examples), place, keep_going)
    known: dict[str, NDArray[Any]] = dict(work.broadcast)
    values: dict[str, Float32] = {}
    steps, finite = 0, 0
    for index, one in enumerate(plan.passes):
        swept = work.sweep(one, index)
        known |= _under(f"{one.name}.carry", swept.carry)
        values[f"{one.name}.metrics"] = swept.metrics
        finite += swept.finite if finite == steps else 0
        steps += swept.steps
    means = {s.name: _buffer((s.size,)) for s in plan.report.segments if s.reduction == "mean" and s.name != WEIGHT}
    graphs.pop("report").run(known, means)
    try:
        with np.errstate(over="ignore"):  # an overflow is reported as what it is: a non-finite segment
            report = plan.report.concatenate(values | means, plan.report.weight(work.count))
    except ReportError as error:
        raise NonFiniteReport(f"{error}: {_cause(steps, finite)}") from error
    return Result(report, work.count, steps)


@dataclass(frozen=True, slots=True)
class _Swept:
    """What a pass came to: its last carry, its metrics as sums (M,), its steps, the first of which were finite."""

    carry: dict[str, Float32]
    metrics: Float32
    steps: int
    finite: int


@dataclass(frozen=True, slots=True)
class _Work:
    """What every pass of one assignment shares; vectors and examples under their names at the edge of a graph."""

    graphs: dict[str, Executable]
    broadcast: Arrays
    examples: Arrays
    place: Place
    keep_going: Callable[[], bool]

    @property
    def count(self) -> int:
        """n, the number of local examples."""
        return len(next(iter(self.examples.values())))

    def sweep(self, one: PassPlan, index: int) -> _Swept:
        """Run all steps of a pass."""
        size = one.loop.batch_size
        batch = {name: _buffer((size, *array.shape[1:]), array.dtype) for name, array in self.examples.items()}
        mask, metrics, totals = _buffer((size,)), _buffer((len(one.metrics),)), np.zeros(len(one.metrics))
        # The carry lives in two sets of buffers, read and written in turns: a graph must not write what it reads.
        now, after = ({spec.name: _buffer((spec.size,)) for spec in one.carry} for _ in range(2))
        self.graphs.pop(f"{one.name}.begin").run(self.broadcast, _under("next", now))
        step, steps, finite = self.graphs.pop(f"{one.name}.step"), 0, 0
        fixed = {**self.broadcast, **batch, "mask": mask, "noise": _buffer((size,), np.int32)}
        for indices, real in batches(one.loop, self.count, self.place, index):
            if not self.keep_going():
                raise DeadlinePassed(
                    f"stopped in pass {one.name!r} after {steps} steps: the report would come too late"
                )
            for name, array in self.examples.items():
                array.take(indices, axis=0, out=batch[name], mode="clip")  # any other mode copies twice
            np.copyto(mask, real)
            if one.noise:
                np.copyto(fixed["noise"], noise(self.place, index, steps, size))
            step.run(fixed | _under("carry", now), {**_under("next", after), "metrics": metrics})
            now, after = after, now
            totals += metrics
            finite += finite == steps and bool(np.isfinite(metrics).all())
            steps += 1
        with np.errstate(over="ignore"):
            return _Swept(now, totals.astype(np.float32), steps, finite)


def _cause(steps: int, finite: int) -> str:
    """Why a report is not finite, when the loss was for so many of the steps; examples always are."""
    if finite == 0:
        return "the loss was not finite in the first step, before any training here, though the examples are"
    if finite == 1 < steps:
        return "after one step the loss was not finite: the gradient is not, or the learning rate is far too large"
    if finite < steps:
        return "the loss left the finite numbers in later steps: training diverged, a lower client_lr is the remedy"
    return "every loss was finite: the last gradient is not, or training diverged in the last step"


def _check(plan: Plan) -> None:
    """Refuse a plan whose report cannot be filled from its passes."""
    if not plan.examples.fields:
        raise PlanRefused(f"plan {plan.name!r} names no example field, so there is nothing to count")
    sums = {f"{one.name}.metrics": len(one.metrics) for one in plan.passes}
    for segment in plan.report.segments:
        if segment.reduction == "sum" and segment.name != WEIGHT and sums.get(segment.name) != segment.size:
            raise PlanRefused(
                f"plan {plan.name!r} wants {segment.size} sums in segment {segment.name!r}; its passes make {sums}"
            )


def _under(prefix: str, values: Arrays) -> dict[str, NDArray[Any]]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _buffer(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise PlanRefused(f"the plan asks for a buffer of {list(shape)}: {error}") from error
