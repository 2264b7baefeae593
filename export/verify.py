"""Verification of a bundle: digests, and plan and certificate rebuilt from the model's source."""

from __future__ import annotations

import msgspec
import torch

from export.build import build_plan, with_hold_out
from export.errors import ParityFailed
from export.formats import formats
from export.parity import KINKED_TOLERANCE, certify
from export.planned_model import planned_model, source_of
from export.predict import build_predict
from fedcore.algorithms import create, module_of, name_of, settings_of
from fedcore.algorithms.algorithm import Algorithm, State
from fedcore.bundle import Bundle, Certificate, Manifest
from fedcore.checkpoint import decode
from fedcore.codecs.compression import Compression
from fedcore.errors import PlanError, UntrustedAlgorithm
from fedcore.params import VectorSpec
from fedcore.plan import Plan, PredictPlan


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
