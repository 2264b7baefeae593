"""The work of one assignment: fetch plan, graphs and checkpoint, and train. It sends the coordinator nothing."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from device_runtime.errors import NonFiniteReport, PlanRefused
from device_runtime.examples import ExampleSource
from device_runtime.permission.policy import check_model
from device_runtime.runner import TrainingResult
from device_runtime.state.folder import BlobCache
from device_runtime.trainer import Job, Limits, Texts, Trainer
from fedcore import checkpoint
from fedcore.batching import SECRET_BYTES, StreamKey
from fedcore.compression import quantise, upload_bytes
from fedcore.errors import FedcoreError, ReportError
from fedcore.params import Float32, VectorSpec
from fedcore.plan import Plan
from fedcore.report import ReportLayout
from fedcore.wire.messages import Assignment

_UNWEIGHTED = "values"


@dataclass(frozen=True, slots=True)
class Worker:
    """A trainer, its examples, and the cache of blobs.

    keep_going: called while training; whether there is time left. It may raise to end the work. min_examples: the
    fewest that the task runs on, without those that its plan holds out.
    """

    trainer: Trainer
    examples: ExampleSource
    cache: BlobCache
    keep_going: Callable[[], bool]
    min_examples: int = 0

    def plan(self, assignment: Assignment) -> Plan:
        """The plan of an assignment's round. Raises PlanRefused, StateError or TransportError."""
        return plan_of(assignment, self.cache)

    def train(
        self, assignment: Assignment, plan: Plan, limits: Limits, kept: dict[str, Float32] | None = None
    ) -> TrainingResult:
        """Run the plan on this device's examples. kept: as of a Job.

        Raises AssignmentError, StateError or TransportError.
        """
        refs = plan.graphs.get(self.trainer.format)
        if refs is None:
            raise PlanRefused(
                f"plan {plan.name!r} has graphs in {sorted(plan.graphs)}, this device runs {self.trainer.format!r}"
            )
        # In a secure round a graph's noise must stay secret: a plan could use it to place examples apart in the sum.
        secret = b"" if assignment.secagg is None else secrets.token_bytes(SECRET_BYTES)
        texts = Texts(self.cache.get, self.trainer, limits, self.keep_going)
        try:
            job = Job(
                plan=plan,
                examples=self.examples.load(plan.examples, self.min_examples, texts.tokenize),
                graphs={name: self.cache.get(ref) for name, ref in refs.items()},
                frozen=None if plan.frozen is None else self.cache.file(plan.frozen.blob),
                kept=kept,
                broadcast=checkpoint.decode(
                    self.cache.newest(assignment.checkpoint, assignment.plan.sha256), plan.broadcast
                ),
                key=StreamKey(assignment.seed, assignment.round, assignment.slot, secret),
            )
        except FedcoreError as error:
            raise PlanRefused(str(error)) from error
        check_model(assignment, job.broadcast)
        return replace(self.trainer.train(job, texts.left, self.keep_going), cut=texts.cut)

    def to_move(self, assignment: Assignment, plan: Plan) -> int:
        """Bytes still to transfer: blobs that are kept and not cached, the checkpoint, the report."""
        missing = sum(ref.size for ref in plan.kept_refs(self.trainer.format) if not self.cache.holds(ref))
        return missing + assignment.checkpoint.size + upload_bytes(plan.report)

    def to_cache(self, assignment: Assignment, plan: Plan) -> int:
        """Bytes that the cache must hold between rounds: the plan, its graphs and frozen vectors, the checkpoint."""
        return self.cache.counted({assignment.plan, assignment.checkpoint, *plan.kept_refs(self.trainer.format)})


def encode_report(assignment: Assignment, plan: Plan, result: TrainingResult) -> bytes:
    """The stored form of a report: weighted, as the body of an upload; in a secure round unweighted, for masking.

    Raises NonFiniteReport when its numbers are too far apart to quantise.
    """
    if assignment.secagg is not None:
        return checkpoint.encode({_UNWEIGHTED: result.values})
    report_L = plan.report.weigh(result.values, result.weight)
    if not plan.report.bits:
        return checkpoint.encode({"report": report_L})
    try:
        return quantise(plan.report, report_L, StreamKey(assignment.seed, assignment.round, assignment.slot))
    except ReportError as error:
        raise NonFiniteReport(str(error)) from error


def decode_unweighted(data: bytes, layout: ReportLayout) -> Float32:
    """The values (V,) of a report that a secure round stored. Raises SchemaError."""
    spec = VectorSpec(_UNWEIGHTED, layout.size - 1)
    return checkpoint.decode(data, (spec,))[_UNWEIGHTED]


def plan_of(assignment: Assignment, cache: BlobCache) -> Plan:
    """The plan of the trip that an assignment's round runs. Raises PlanRefused, StateError or TransportError."""
    try:
        return Plan.decode(cache.get(assignment.plan)).of_round(assignment.round)
    except FedcoreError as error:
        raise PlanRefused(str(error)) from error
