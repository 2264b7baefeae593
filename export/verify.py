"""Check a bundle from the outside: digests, and plan and certificate made again from the model's source."""

from __future__ import annotations

import msgspec

from export.build import build_plan
from export.errors import ParityFailed, UnknownModel
from export.model import Model
from export.models import MODELS, load
from export.parity import certify
from fedcore.algorithms import create
from fedcore.bundle import Bundle, Certificate, Manifest
from fedcore.plan import Plan


def verify_bundle(bundle: Bundle, source: str | None = None) -> Certificate:
    """A fresh certificate for the graphs in `bundle`, whose every blob is checked on the way.

    source: where the model is found. Without one only a built-in model is loaded: a bundle may come from anywhere, and
    importing what it names would run its author's code.
    Raises UnknownModel when a source is needed, PlanError or DigestMismatch for a damaged bundle, ParityFailed when the
    rest of the plan, or its graphs, are not what export makes of this model.
    """
    for _ in bundle.blobs():
        pass
    plan, manifest = bundle.plan, bundle.manifest
    if source is None and manifest.model not in MODELS:
        raise UnknownModel(f"the bundle's model is {manifest.model!r}; if you trust that code, name it with --model")
    first, label = plan.examples.fields[0], plan.examples.fields[-1]
    model = Model(load(source or manifest.model, first.shape, label.high))
    algorithm = create(manifest.algorithm.name, manifest.algorithm.settings)
    _compare(plan, build_plan(model, algorithm, ())[0], manifest)
    graphs = {fmt: {name: bundle.read(ref) for name, ref in refs.items()} for fmt, refs in plan.graphs.items()}
    return certify(model, algorithm, plan, graphs)


def _compare(plan: Plan, rebuilt: Plan, manifest: Manifest) -> None:
    """All but the graphs: loops, weighting, noise and labels as much as the parameters."""
    ours, theirs = (msgspec.structs.asdict(one) for one in (plan, rebuilt))
    differ = [name for name in ours if name != "graphs" and ours[name] != theirs[name]]
    if differ:
        raise ParityFailed(
            f"the plan's {', '.join(differ)} are not what export makes of model {manifest.model} and algorithm "
            f"{manifest.algorithm.name} with the manifest's settings; model or settings have changed since, or the plan"
        )
