"""Verification of a bundle: digests, plan, certificate, and its model rebuilt from its source."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from export.build import build_plan, with_hold_out
from export.errors import ParityFailed, UnknownModel
from export.formats import formats
from export.model import Model, ModelSpec, parameter_count
from export.models import MODELS, load
from export.normalising import DEVIATION_OF, MEAN_OF, as_planned
from export.parity import KINKED_TOLERANCE, certify
from export.predict import build_predict
from fedcore.algorithms import create, module_of, name_of, settings_of
from fedcore.algorithms.algorithm import Algorithm, State
from fedcore.bundle import Bundle, Certificate, Manifest
from fedcore.checkpoint import decode, decode_frozen, frozen_specs_of
from fedcore.compression import Compression
from fedcore.errors import PlanError, UntrustedAlgorithm
from fedcore.params import FLOAT_BYTES, VectorSpec
from fedcore.plan import ExampleSpec, Plan, PredictPlan


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
    given = {name.format(field) for name in (MEAN_OF, DEVIATION_OF) for field in plan.normalised}
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
