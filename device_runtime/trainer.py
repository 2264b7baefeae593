"""Trainers: they run a plan's graphs over local examples, tokenize texts, and make a released model personal."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from device_runtime.backends.backend import Arrays, Backend, Executable
from device_runtime.errors import DeviceError, ExamplesError, NonFiniteReport, PlanRefused, RuntimeFailed
from device_runtime.runner import Local, PassResult, PassRunner, TrainingResult, execute
from device_runtime.texts import TextColumn, Tokens
from fedcore import checkpoint, plan as plans
from fedcore.batching import HoldOut, StreamKey
from fedcore.errors import SchemaError
from fedcore.params import Float32, Frozen, VectorSpec
from fedcore.report import all_finite
from fedcore.schedule import Loop

# Personal models: a plan's own local steps from a released model, measured on examples that they leave out.
#
# Everything that runs a graph is in `personalise`, in the process of a trainer. A plan that trains has no graph that
# only measures, but each step tells the loss of its batch at the parameters that it starts from. So one step from given
# parameters measures them, and what it makes of them is dropped.

SHARE = 0.2
"""The share of examples that are left out, where the plan holds out no larger one."""
LEAST = 10
"""The fewest examples to train on, and to measure on."""
PAIRS = 32
"""Into how many groups the examples to measure on are divided, unless there are fewer, or a batch holds less."""
CERTAIN = 2.0
"""How many of its own standard errors the mean gain must exceed: chance alone does so 4 times in 100 at most."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The personal parameters, float32 (D,), and the mean loss of each of G groups of left-out examples, float32 (G,).

    before: at the released parameters. after: at the personal ones.
    """

    params: Float32
    before: Float32
    after: Float32

    @classmethod
    def of(cls, plan: plans.Plan, result: TrainingResult) -> Measured:
        """What `personalise` put into one vector."""
        size = plan.schema.size
        before, after = np.split(result.values[size:], 2)
        return cls(result.values[:size], before, after)

    def means(self, plan: plans.Plan, count: int) -> tuple[float, float]:
        """The mean losses over all `count` examples that were left out, before and after."""
        sizes = [len(rows) for rows in groups(count, plan.passes[local_pass(plan)].loop.batch_size)]
        before, after = (np.average(losses, weights=sizes) for losses in (self.before, self.after))
        return float(before), float(after)

    @property
    def is_better(self) -> bool:
        """Whether the mean of the differences, of pairs, is above 0 by more than CERTAIN of its standard errors."""
        gains = self.before.astype(np.float64) - self.after
        return bool(gains.mean() > CERTAIN * gains.std(ddof=1) / math.sqrt(len(gains)))


def local_pass(plan: plans.Plan) -> int:
    """The index of the pass whose last carry `params` is a local model.

    Raises PlanRefused when there is none, or the steps need what the devices of another round sent.
    """
    if plan.second is not None:
        raise PlanRefused(
            f"plan {plan.name!r} has two trips, and the steps of the second need what devices sent in the first: "
            "only models of plans with one trip become personal"
        )
    for index, stage in enumerate(plan.passes):
        if VectorSpec(plans.PARAMS, plan.schema.size) in stage.carry:
            if "loss" not in stage.metrics or "examples" not in stage.metrics:
                raise PlanRefused(f"pass {stage.name!r} of plan {plan.name!r} measures {stage.metrics}, no loss")
            return index
    names = [stage.name for stage in plan.passes]
    raise PlanRefused(f"no pass of plan {plan.name!r} makes a local model: none of {names} carries {plans.PARAMS!r}")


def local_graphs(plan: plans.Plan, form: str) -> tuple[str, str]:
    """The names of the graphs that local steps need. Raises PlanRefused as `local_pass`, or without the format."""
    name = plan.passes[local_pass(plan)].name
    if form not in plan.graphs:
        raise PlanRefused(f"plan {plan.name!r} has graphs in {sorted(plan.graphs)}, this device runs {form!r}")
    return plans.begin_graph(name), plans.loop_graph(plan.graphs[form], name)


def divided(spec: plans.ExampleSpec, columns: Arrays) -> tuple[Arrays, ...]:
    """The examples to train on, and those to measure on, by the hash that holds out examples.

    What the plan with this `spec` holds out is among the latter. Raises ExamplesError when either are fewer than LEAST.
    """
    share = SHARE if spec.hold_out is None else max(SHARE, spec.hold_out.share)
    whole = replace(spec, hold_out=HoldOut(share))
    kept = whole.kept(columns)
    train, out = int(kept.sum()), int((~kept).sum())
    if min(train, out) < LEAST:
        raise ExamplesError(
            "too-few-examples",
            f"of {len(kept)} examples of collection {spec.collection!r}, {out} are left out to measure on and {train} "
            f"remain to train on; a personal model needs {LEAST} of each",
        )
    return tuple({name: column[side] for name, column in columns.items()} for side in (kept, ~kept))


def groups(count: int, batch_size: int) -> list[NDArray[np.int64]]:
    """The indices of each group of `count` examples: all equally many, or one more, and none more than a batch."""
    return np.array_split(np.arange(count), max(-(-count // batch_size), min(count, PAIRS)))


def result_size(plan: plans.Plan, count: int) -> int:
    """Values of the result of `personalise`, with `count` examples left out."""
    return plan.schema.size + 2 * len(groups(count, plan.passes[local_pass(plan)].loop.batch_size))


def personalise(  # noqa: PLR0913  # one for each kind of input
    plan: plans.Plan,
    graphs: Mapping[str, Executable],
    broadcast: Mapping[str, Float32],
    examples: Arrays,
    left_out: Arrays,
    key: StreamKey,
    *,
    frozen: Mapping[str, Frozen],
    keep_going: Callable[[], bool],
) -> TrainingResult:
    """Measure the released parameters, take the plan's local steps from them over `examples`, and measure again.

    graphs: those of `local_graphs`. broadcast: `params`, (D,), and no more. left_out: to measure on. The values of the
    result are those of a `Measured`, one after the other. Raises as `execute`.
    """
    released, index = broadcast[plans.PARAMS], local_pass(plan)
    work = _Work(plan.passes[index], index, graphs, plans.prefixed(plans.FROZEN, frozen), keep_going)
    try:
        before = work.losses(released, left_out, key)
    except PlanRefused as error:
        words = (
            f"the steps of plan {plan.name!r} do not run on {plans.PARAMS!r} alone, which is all that a release holds"
        )
        raise PlanRefused(f"{words}: {error.detail}") from error
    trained = work.sweep(work.runner(work.stage.loop, examples), released, examples, key)
    params = trained.carry[plans.PARAMS]
    values = np.concatenate([params, before, work.losses(params, left_out, key)])
    if not all_finite(values):
        raise NonFiniteReport("the loss is not finite, or training on this device's examples diverged")
    count = len(next(iter(examples.values())))
    return TrainingResult(values, plan.report.weight(count), count, trained.steps)


@dataclass(frozen=True, slots=True)
class _Work:
    """The graphs of the pass with the local steps, and what is the same in all of their runs."""

    stage: plans.PassPlan
    index: int
    graphs: Mapping[str, Executable]
    frozen: Arrays
    keep_going: Callable[[], bool]

    def runner(self, loop: Loop, examples: Arrays) -> PassRunner:
        """What runs the steps in another loop."""
        many = plans.steps_graph(self.stage.name) in self.graphs
        return PassRunner(
            replace(self.stage, loop=loop), self.index, plans.prefixed(plans.EXAMPLE, examples), many=many
        )

    def sweep(self, runner: PassRunner, params_D: Float32, examples: Arrays, key: StreamKey) -> PassResult:
        """Run the steps from the given parameters."""
        inputs = {**plans.prefixed(plans.BROADCAST, {plans.PARAMS: params_D}), **self.frozen}
        runner.begin(self.graphs[plans.begin_graph(self.stage.name)], inputs)
        step = self.graphs[plans.loop_graph(self.graphs, self.stage.name)]
        return runner.sweep(step, inputs, Local(plans.prefixed(plans.EXAMPLE, examples), key, self.keep_going))

    def losses(self, params_D: Float32, examples: Arrays, key: StreamKey) -> Float32:
        """The mean loss (G,) of each group of examples. Noise, such as dropout's, is the same for any parameters."""
        size, metrics = self.stage.loop.batch_size, self.stage.metrics
        runner = self.runner(Loop(batch_size=size, steps=1, shuffle=False), examples)
        means = []
        for number, rows in enumerate(groups(len(next(iter(examples.values()))), size)):
            group = {name: column[rows] for name, column in examples.items()}
            sums = self.sweep(runner, params_D, group, replace(key, slot=number)).metrics
            means.append(sums[metrics.index("loss")] / sums[metrics.index("examples")])
        return np.array(means, np.float32)


class Limits(msgspec.Struct, frozen=True):
    """The most that training may use: bytes of a process's private memory, and seconds of CPU time."""

    memory_bytes: int
    cpu_s: float

    def bound(self) -> None:
        """Apply these limits to this process. A later call may raise them again.

        Memory means writable memory, including that of libraries (RLIMIT_DATA; only Linux enforces it). At the limit of
        time, SIGXCPU ends the process.
        """
        bound(resource.RLIMIT_DATA, self.memory_bytes)
        bound(resource.RLIMIT_CPU, math.ceil(time.process_time() + self.cpu_s))

    def beside(self, held_bytes: int) -> Limits:
        """What is left of these limits beside memory that is not the process's own, and counts all the same."""
        return Limits(max(self.memory_bytes - held_bytes, 0), self.cpu_s)

    def after(self, cpu_s: float) -> Limits:
        """What is left of these limits after that many seconds of CPU time."""
        return Limits(self.memory_bytes, max(self.cpu_s - cpu_s, 0.0))


def bound(kind: int, most: int) -> None:
    """Set one limit of this process, which it may raise again. Raises OSError or ValueError if that is forbidden."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@dataclass(frozen=True, slots=True)
class Job:
    """The training of one assignment or one personal model: a plan, graphs in the trainer's format (bytes by name), and
    their inputs.

    broadcast: the vectors of `plan.broadcast`; frozen: the file of `plan.frozen`, checked, by its path or a descriptor,
    None where the plan freezes nothing; kept: those of `plan.kept`, None
    before the device's first round; examples: `(n, *shape)` for every field of the plan, n at least 1. left_out: as
    `examples`, to measure a personal model on. If there are any, that is the work, and the broadcast is `params` alone.
    """

    plan: plans.Plan
    graphs: dict[str, bytes]
    broadcast: dict[str, Float32]
    examples: Arrays
    key: StreamKey
    frozen: Path | int | None = None
    kept: dict[str, Float32] | None = None
    left_out: Arrays = field(default_factory=dict)

    @property
    def count(self) -> int:
        """n, the number of local examples."""
        return len(next(iter(self.examples.values()), ()))

    @property
    def mapped(self) -> dict[str, Frozen]:
        """The vectors of `plan.frozen`, in the memory of their file. Raises PlanRefused where they are others."""
        if self.frozen is None or self.plan.frozen is None:
            return {}
        try:
            return checkpoint.map_frozen(self.frozen, self.plan.frozen.vectors)
        except (SchemaError, OSError) as error:
            raise PlanRefused(f"the frozen vectors of plan {self.plan.name!r} cannot be used: {error}") from error

    @property
    def result_size(self) -> int:
        """Values of the result."""
        if self.left_out:
            return result_size(self.plan, len(next(iter(self.left_out.values()))))
        return self.plan.report.size - 1

    @property
    def keeps(self) -> tuple[VectorSpec, ...]:
        """What the device is to keep for its next round."""
        return () if self.left_out else self.plan.kept


class Trainer(Protocol):
    """An engine for graphs of one `format`, in this or another process; `runtime` is its name and version."""

    @property
    def format(self) -> str:
        """The key of this engine's graphs in a plan."""

    @property
    def runtime(self) -> str:
        """Name and version."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of its work in other processes, running or ended."""

    def train(self, job: Job, limits: Limits, keep_going: Callable[[], bool]) -> TrainingResult:
        """Run the plan. `keep_going` is called regularly, and may raise to end the work.

        Raises PlanRefused when a graph cannot be loaded or contradicts the plan, RuntimeFailed when one fails or uses
        up its limits, DeadlinePassed when `keep_going` returns false, NonFiniteReport.
        """

    def tokenize(self, column: TextColumn, limits: Limits, keep_going: Callable[[], bool]) -> Tokens:
        """The tokens of texts: see TextColumn. `keep_going` and RuntimeFailed: as in `train`."""


@dataclass(frozen=True, slots=True)
class InProcess:
    """The trainer in this process, for processes that only train, such as emulated devices.

    A graph that crashes its engine ends the process. confine: applies the limits to this process; by default it does
    nothing.
    """

    backend: Backend
    confine: Callable[[Limits], None] = lambda limits: None

    @property
    def format(self) -> str:
        """That of the backend."""
        return self.backend.format

    @property
    def runtime(self) -> str:
        """That of the backend."""
        return self.backend.runtime

    @property
    def cpu_s(self) -> float:
        """0: all work is in this process."""
        return 0.0

    def tokenize(self, column: TextColumn, limits: Limits, keep_going: Callable[[], bool]) -> Tokens:
        """Make tokens: see Trainer."""
        self.confine(limits)
        return column.tokens(keep_going)

    def train(self, job: Job, limits: Limits, keep_going: Callable[[], bool]) -> TrainingResult:
        """Run the plan: see Trainer. `keep_going` is called before every batch."""
        frozen = job.mapped  # now: later no file may be opened
        self.confine(limits.beside(sum(vector.nbytes for vector in frozen.values())))
        try:
            graphs = {name: self.backend.load(graph, name) for name, graph in job.graphs.items()}
            if job.left_out:
                data = job.broadcast, job.examples, job.left_out, job.key
                return personalise(job.plan, graphs, *data, frozen=frozen, keep_going=keep_going)
            received = job.broadcast, job.examples, job.key
            return execute(job.plan, graphs, *received, frozen=frozen, kept=job.kept, keep_going=keep_going)
        except DeviceError:
            raise
        except Exception as error:  # any error of an engine becomes the outcome of the session
            raise RuntimeFailed("the engine failed", f"{type(error).__name__}: {error}") from error


class Texts:
    """Has a trainer make tokens of a plan's texts, within limits. blob: gets tokenizers. keep_going: as of a Trainer.

    `cut`: texts that were too long.
    """

    def __init__(
        self, blob: Callable[[plans.BlobRef], bytes], trainer: Trainer, limits: Limits, keep_going: Callable[[], bool]
    ) -> None:
        self._blob, self._trainer, self._limits, self._keep_going = blob, trainer, limits, keep_going
        self._before_s, self.cut = trainer.cpu_s, 0

    def tokenize(self, field: plans.Field, tokenizer: plans.Tokenizer, texts: NDArray[np.object_]) -> NDArray[np.int32]:
        """Texts (n,) as the field's tokens (n, T). Raises as `blob` and `Trainer.tokenize`."""
        column = TextColumn(field, self._blob(tokenizer.blob), tokenizer.padding, texts)
        tokens = self._trainer.tokenize(column, self.left, self._keep_going)
        self.cut += tokens.cut
        return tokens.ids

    @property
    def left(self) -> Limits:
        """What making tokens left of the limits."""
        return self._limits.after(self._trainer.cpu_s - self._before_s)
