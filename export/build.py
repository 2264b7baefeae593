"""The build of a bundle from a model and an algorithm: capture, write, certify, put together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import UNSET
from msgspec.structs import replace

from device_runtime import texts
from device_runtime.errors import PlanRefused
from export.capture import (
    Captured,
    Received,
    Table,
    capture_begin,
    capture_first,
    capture_next,
    capture_report,
    capture_step,
)
from export.decompositions import TABLE
from export.errors import ExportError, InvalidModel
from export.formats import Format, formats
from export.model import Model
from export.parity import certify
from export.predict import build_predict
from export.purity import EXAMPLES, check_pure
from export.trial_examples import check_ranges, cost_of_bits, draw_examples
from fedcore import plan as plans
from fedcore.algorithms import name_of, settings_of
from fedcore.algorithms.algorithm import Algorithm, State, Trip, keeps_client_state, ranges_of, trips_of
from fedcore.algorithms.check import check
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.facts import for_model
from fedcore.algorithms.question import QUESTION, text_of
from fedcore.batching import HoldOut
from fedcore.bundle import AlgorithmRef, Bundle, Manifest
from fedcore.checkpoint import encode, encode_frozen, frozen_specs_of
from fedcore.compression import Compression
from fedcore.params import Frozen, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, FrozenVectors, PassPlan, Plan, TripPlan
from fedcore.report import LOSS_COUNTS, WEIGHT, ReportLayout, Segment, metrics_segment

Graphs = dict[BlobRef, bytes]
"""The blobs that a plan names: serialised graphs, of all trips and formats, and the frozen vectors."""

FEW_VALUES = 2**15
"""The most values of all vectors that a step reads for a graph of many steps to be worthwhile: in a larger step the
cost of the call hardly counts."""

Progress = Callable[[str, str], None]
"""Called with a format (or none) and the current activity."""


def export_bundle(  # noqa: PLR0913  # what is exported, how, and where it goes
    model: Model,
    algorithm: Algorithm,
    folder: Path,
    source: str | None = None,
    targets: Sequence[str] = ("onnx",),
    progress: Progress = lambda form, doing: None,
    *,
    compression: Compression = Compression(),
    hold_out: HoldOut | None = None,
) -> Bundle:
    """Trace, write and certify every graph in every format of `targets`, and write the bundle to `folder`.

    A model without a predict graph is exported without; the manifest says why.

    source: how `muster` finds the model again, a built-in name or `package.module:function`. compression: of reports.
    hold_out: of each device's examples.
    Raises ExportError (see export/errors.py), CompressionError, InvalidAlgorithm, and InvalidSetting when an
    evaluation's ranges are not those of the model's metrics.
    """
    check(algorithm)
    algorithm = for_model(algorithm, model.metrics[1:], model.schema)
    state = {name: vector.numpy() for name, vector in algorithm.init(torch.from_numpy(model.initial)).items()}
    plan, graphs = build_plan(model, algorithm, targets, progress)
    plan, no_predict = with_hold_out(compression.applied(plan), hold_out), ""
    if plan.question is UNSET:  # whose model is no function of examples
        try:
            predict, written = build_predict(model, targets, progress)
        except ExportError as error:  # devices can train it all the same
            no_predict = str(error)
        else:
            plan, graphs = msgspec.structs.replace(plan, predict=predict), graphs | written
    proof = certify(model, algorithm, plan, graphs, progress)
    certificate = msgspec.json.encode(msgspec.structs.replace(proof, quantisation=cost_of_bits(model)))
    blobs = [plan.encode(), encode(state), certificate]
    settings = settings_of(algorithm)
    manifest = Manifest(
        name=plan.name,
        model=source or model.spec.name,
        algorithm=AlgorithmRef(name_of(algorithm), settings),
        compress=str(compression),
        no_predict=no_predict,
        plan=BlobRef.of(blobs[0]),
        state=BlobRef.of(blobs[1]),
        certificate=BlobRef.of(blobs[2]),
    )
    return Bundle.write(folder, manifest, [*blobs, *graphs.values()])


def build_plan(
    model: Model,
    algorithm: Algorithm,
    targets: Sequence[str] = ("onnx",),
    progress: Progress = lambda form, doing: None,
) -> tuple[Plan, Graphs]:
    """The plan and its graphs; with no targets, the plan without any graph.

    Raises UnknownFormat, InvalidModel, UnsupportedOperator or DynamicControlFlow.
    """
    algorithm = for_model(algorithm, model.metrics[1:], model.schema)
    _try_out(model)
    check_ranges(model)
    state = algorithm.init(torch.from_numpy(model.initial))
    writer = _Writer(formats(targets), progress)
    first, *others = (_build_trip(model, algorithm, trip, state, writer) for trip in trips_of(algorithm))
    for tokenizer in model.spec.tokenizers:
        _check_tokenizer(model.spec.name, tokenizer)
        writer.blobs[BlobRef.of(tokenizer)] = tokenizer
    plan = Plan(
        name=f"{model.spec.name}-{algorithm.name}",
        schema=model.schema,
        examples=ExampleSpec(model.spec.fields),
        frozen=writer.add_frozen(model.frozen_vectors),
        second=others[0] if others else None,
        question=text_of(algorithm) or UNSET,
        **msgspec.structs.asdict(first),
    )
    return plan, writer.blobs


def with_hold_out(plan: Plan, hold_out: HoldOut | None) -> Plan:
    """The plan, run on one side of a hold-out of each device's examples; None holds out none."""
    return replace(plan, examples=replace(plan.examples, hold_out=hold_out))


def _check_tokenizer(name: str, data: bytes) -> None:
    try:
        texts.check(data)
    except PlanRefused as error:
        raise InvalidModel(f"model {name}: {error}") from error


def _try_out(model: Model) -> None:
    """Raise ImpureModel if the model cannot be traced, before a trace leaves its values in layers."""
    try:
        check_pure(model, draw_examples(model.spec, EXAMPLES, np.random.default_rng(0)))
    except ExportError:
        raise
    except Exception:  # whatever the user's own code raises: the trace says in which layer
        return


def _build_trip(model: Model, algorithm: Algorithm, trip: Trip, state: State, writer: _Writer) -> TripPlan:
    writer.begin_trip()
    broadcast = tuple(VectorSpec(name, vector.numel()) for name, vector in trip.broadcast(state).items())
    passes, metrics, bounded, kept = [], [], isinstance(algorithm, Clipped), tuple[VectorSpec, ...]()
    asks = algorithm.family == QUESTION
    if keeps_client_state(algorithm):
        first = functools.partial(capture_first, algorithm, Received(broadcast, {}))
        kept = writer.write(plans.FIRST_KEPT, first).specs
    carries: dict[str, Sequence[VectorSpec]] = {}
    for item in trip.passes:
        received = Received(broadcast, dict(carries), kept)
        begin = writer.write(plans.begin_graph(item.name), functools.partial(capture_begin, item, received))
        step = functools.partial(capture_step, model, item, received, begin.specs)
        ports = writer.write_step(item.name, step, item.loop.batch_size).inputs
        noisy = any(port.name == plans.NOISE for port in ports)
        passes.append(PassPlan(item.name, item.loop, begin.specs, model.metrics, noisy))
        # Sums of losses would reveal what a report that is clipped for privacy hides, and those of rows what a question
        # bounds.
        if not bounded and not asks:
            metrics.append(Segment(metrics_segment(item.name), len(model.metrics), "sum", model.metrics))
        carries[item.name] = begin.specs
    if metrics and algorithm.family != EVALUATION:
        metrics.append(LOSS_COUNTS)
    received = Received(broadcast, carries, kept)
    report = writer.write(plans.REPORT, functools.partial(capture_report, trip, received))
    if keeps_client_state(algorithm):
        writer.write(plans.NEXT_KEPT, functools.partial(capture_next, algorithm, received))
    ranges = ranges_of(trip)
    segments = [Segment(spec.name, spec.size, "mean", range=ranges.get(spec.name, UNSET)) for spec in report.specs]
    return TripPlan(
        broadcast=broadcast,
        passes=tuple(passes),
        report=ReportLayout((*segments, Segment(WEIGHT, 1, "sum"), *metrics), algorithm.weighting, bounded),
        graphs=writer.graphs,
        kept=kept,
    )


class _Writer:
    """Captures graphs and writes them in every format, and gathers all blobs of a plan."""

    def __init__(self, chosen: Sequence[Format], progress: Progress) -> None:
        self.blobs: Graphs = {}
        self.graphs: dict[str, dict[str, BlobRef]] = {}
        self._chosen, self._progress = chosen, progress

    def begin_trip(self) -> None:
        """Start a new set of graphs, because names are unique only within a trip."""
        self.graphs = {form.name: {} for form in self._chosen}

    def add_frozen(self, vectors: dict[str, Frozen]) -> FrozenVectors | None:
        """The reference of the frozen vectors, if there are any."""
        if not vectors:
            return None
        data = encode_frozen(vectors)
        self.blobs[ref := BlobRef.of(data)] = data
        return FrozenVectors(ref, frozen_specs_of(vectors))

    def write(self, name: str, capture: Callable[[], Captured]) -> Captured:
        """Write a graph without a batch, which is captured once for all formats."""
        self._progress("", f"trace {name}")
        captured = capture()
        for form in self._chosen:
            self._write(form, name, captured)
        return captured

    def write_step(self, name: str, capture: Callable[[int | None, Table], Captured], batch: int) -> Captured:
        """Write the graph of one step of the pass `name`, or of many if steps are small.

        It is captured for each format, as some fix the batch, and each has its own forms of operators.
        """
        captured = None
        for form in self._chosen:
            self._progress(form.name, f"trace {plans.step_graph(name)}")
            captured = capture(batch if form.fixed_batch else None, form.table)
            read = sum(math.prod(port.shape) for port in captured.inputs if not port.batched)
            many = form.write_steps(captured) if read <= FEW_VALUES else None
            if many is None:
                self._write(form, plans.step_graph(name), captured)
            else:
                self._keep(form, plans.steps_graph(name), many)
        return captured or capture(None, TABLE)

    def _write(self, form: Format, name: str, captured: Captured) -> None:
        self._progress(form.name, f"write {name}")
        self._keep(form, name, form.write(captured))

    def _keep(self, form: Format, name: str, written: bytes) -> None:
        ref = self.graphs[form.name][name] = BlobRef.of(written)
        self.blobs[ref] = written
