"""The build of a bundle from a model and an algorithm, and the verification of one."""

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
from export.errors import ExportError, InvalidModel, ParityFailed, UnknownModel
from export.model import Model, ModelSpec, parameter_count
from export.models import MODELS, load
from export.normalising import as_planned
from export.parity import KINKED_TOLERANCE, certify
from export.predict import Format, build_predict, formats
from export.purity import EXAMPLES, check_pure
from export.trial_examples import check_ranges, cost_of_bits, draw_examples
from fedcore import plan as plans
from fedcore.algorithms import create, module_of, name_of, settings_of
from fedcore.algorithms.algorithm import Algorithm, State, Trip, keeps_client_state, ranges_of, trips_of
from fedcore.algorithms.check import check
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.facts import for_model
from fedcore.algorithms.question import QUESTION, text_of
from fedcore.batching import HoldOut
from fedcore.bundle import AlgorithmRef, Bundle, Certificate, Manifest
from fedcore.checkpoint import decode, decode_frozen, encode, encode_frozen, frozen_specs_of
from fedcore.compression import Compression
from fedcore.errors import PlanError, UntrustedAlgorithm
from fedcore.params import FLOAT_BYTES, Frozen, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, FrozenVectors, PassPlan, Plan, PredictPlan, TripPlan
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
        class_names=model.spec.class_names or UNSET,
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


# Verification of a bundle: digests, plan, certificate, and its model rebuilt from its source.


def source_of(bundle: Bundle, named: str | None = None) -> str:
    """The source of a bundle's model: `named`, else the bundle's own if that is a built-in model.

    A bundle is untrusted, and importing a module that it names would run its author's code. Raises UnknownModel when
    the model has to be named.
    """
    if named is None and bundle.manifest.model not in MODELS:
        raise UnknownModel(
            f"the bundle's model is {bundle.manifest.model!r}; if you trust that code, name it with --model"
        )
    return named or bundle.manifest.model


def planned_model(bundle: Bundle, source: str | ModelSpec, seed: int = 0) -> Model:
    """The model of a bundle, sized for its examples, with its frozen values. seed: of the trained weights.

    Raises UnknownModel, InvalidModel, PlanError for examples without fields or a model larger than the initial state,
    and SchemaError if the plan's frozen values are not the model's.
    """
    plan = bundle.plan
    if not plan.examples.fields:
        raise PlanError(f"the examples of plan {plan.name} have no fields")
    spec = _sized(bundle, plan.examples, source) if isinstance(source, str) else source
    model = Model(as_planned(spec, plan).with_local(",".join(plan.schema.local)), seed)
    if plan.frozen is not None:  # they may have been drawn under another seed
        model.freeze(decode_frozen(bundle.read(plan.frozen.blob), frozen_specs_of(model.frozen_vectors)))
    return model


def _sized(bundle: Bundle, examples: ExampleSpec, source: str) -> ModelSpec:
    """A model for the examples of a bundle, which is untrusted.

    Raises PlanError when a built-in model would be larger than the initial state, before it takes memory.
    """
    spec = load(source, examples.fields[0].shape, examples.fields[-1].high)
    if source not in MODELS:  # its size is its own
        return spec
    wanted, capacity = parameter_count(spec), len(bundle.read(bundle.manifest.state)) // FLOAT_BYTES
    if wanted > capacity:
        raise PlanError(
            f"the model {spec.name} has {wanted:,} parameters with the examples of the plan in {bundle.folder}, whose "
            f"initial state holds {capacity:,} numbers at most; name the model of the plan, or export it again"
        )
    return spec


def verify_bundle(bundle: Bundle, source: str | None = None, own: str | None = None) -> Certificate:
    """A new certificate for the graphs in `bundle`, after checking every blob.

    source, own: the sources of model and algorithm. Without them only built-in ones are loaded (`source_of`).
    Raises UnknownModel or UntrustedAlgorithm when one of them is needed, PlanError or DigestMismatch for a damaged
    bundle, ParityFailed when plan or graphs differ from an export of this model.
    """
    for _ in bundle.blobs():
        pass
    plan, manifest = bundle.plan, bundle.manifest
    source = source_of(bundle, source)
    formats(tuple(plan.graphs))
    if not plan.graphs:
        raise PlanError(f"plan {plan.name} has no graphs")
    model = planned_model(bundle, source)
    if plan.frozen is not None:
        _check_frozen(model, plan, manifest)
    algorithm_name = manifest.algorithm.name
    if own is None and module_of(algorithm_name):
        raise UntrustedAlgorithm(
            f"the bundle's algorithm is {algorithm_name!r}; if you trust its code, name it with --algorithm"
        )
    algorithm = create(own or algorithm_name, manifest.algorithm.settings, [module_of(own or "")])
    if plan.predict is not None and _edge(plan.predict) != _edge(build_predict(model, ())[0]):
        raise ParityFailed(f"the plan predicts otherwise than model {manifest.model}: in inputs or outputs")
    rebuilt = Compression.parse(manifest.compress).applied(build_plan(model, algorithm, ())[0])
    _compare(plan, with_hold_out(rebuilt, plan.examples.hold_out), manifest)  # the plan alone says what is held out
    _compare_manifest(bundle, algorithm, algorithm.init(torch.from_numpy(model.initial)))
    certificate = certify(model, algorithm, plan, {ref: bundle.read(ref) for ref in plan.graph_refs})
    _compare_certificates(bundle.certificate, certificate)
    return certificate


def _check_frozen(model: Model, plan: Plan, manifest: Manifest) -> None:
    """Raise ParityFailed for frozen values of a plan, which `model` has, that its source has otherwise.

    Those that the source draws, under a seed that nobody notes, may be any, as those of normalisers.
    """
    given = {name.format(field) for name in (plans.MEAN_OF, plans.DEVIATION_OF) for field in plan.normalised}
    planned, own = model.frozen_vectors, Model(model.spec, 1).frozen_vectors
    differ = [name for name in own.keys() - given if not np.allclose(own[name], planned[name], 1e-5, 1e-6)]
    again = Model(model.spec, 2).frozen_vectors if differ else {}
    if fixed := [name for name in sorted(differ) if np.array_equal(own[name], again[name])]:
        raise ParityFailed(
            f"the plan's frozen {fixed[0]} is not that of model {manifest.model}; its weights have changed since, or "
            "the plan"
        )


def _edge(predict: PredictPlan) -> PredictPlan:
    """All but the graphs."""
    return msgspec.structs.replace(predict, graphs={})


def _compare(plan: Plan, rebuilt: Plan, manifest: Manifest) -> None:
    """Compare everything but the graphs: parameters, loops, weighting, noise and labels."""
    differ = ["number of trips"] if len(plan.trips) != len(rebuilt.trips) else []
    for trip, trip_now in zip(plan.trips, rebuilt.trips, strict=False):
        ours, theirs = (msgspec.structs.asdict(side) for side in (trip, trip_now))
        differ += [name for name in ours if name not in {"graphs", "predict"} and ours[name] != theirs[name]]
    if differ:
        raise ParityFailed(
            f"the plan's {', '.join(differ)} are not what export makes of model {manifest.model} and algorithm "
            f"{manifest.algorithm.name} with the manifest's settings; model or settings have changed since, or the plan"
        )


def _compare_manifest(bundle: Bundle, algorithm: Algorithm, state: State) -> None:
    """Check the server's half: all settings, the name, a usable initial state."""
    manifest, settings = bundle.manifest, settings_of(algorithm)
    declared = manifest.algorithm
    if manifest.name != bundle.plan.name or declared.name != name_of(algorithm) or declared.settings != settings:
        raise ParityFailed(f"the manifest is not that of {bundle.plan.name} by {name_of(algorithm)} with {settings}")
    decode(bundle.read(manifest.state), [VectorSpec(name, vector.numel()) for name, vector in state.items()])


def _compare_certificates(certificate: Certificate, fresh: Certificate) -> None:
    """Check that the bundle's certificate is plausible: its measurements depend on the machine, all else must match."""
    if set(certificate.formats) != set(fresh.formats):
        raise ParityFailed(
            f"the certificate is about {sorted(certificate.formats)}, the plan has {sorted(fresh.formats)}"
        )
    for name, now in fresh.formats.items():
        recorded = certificate.formats[name]
        if [parity.graph for parity in recorded.parity] != [parity.graph for parity in now.parity]:
            raise ParityFailed(f"the certificate of {name} is about other graphs than the plan has")
        if recorded.version != now.version or recorded.footprint.graph_bytes != now.footprint.graph_bytes:
            raise ParityFailed(f"the certificate of {name} is for other graphs: {recorded.version}, now {now.version}")
        if not recorded.worst <= recorded.tolerance <= KINKED_TOLERANCE:
            raise ParityFailed(
                f"the certificate of {name} allows {recorded.tolerance:.1e} and found {recorded.worst:.1e}"
            )
        if not (recorded.footprint.peak_rss_mb > 0 and recorded.footprint.step_cpu_ms > 0):
            raise ParityFailed(f"the certificate of {name} has a footprint that nothing can have")
