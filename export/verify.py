"""Check a bundle from the outside: digests, and the certificate computed again from the model's source."""

from __future__ import annotations

from export.errors import ParityFailed, UnknownModel
from export.model import Model
from export.models import MODELS, load
from export.parity import certify
from fedcore.algorithms import create
from fedcore.bundle import Bundle, Certificate


def verify_bundle(bundle: Bundle, source: str | None = None) -> Certificate:
    """A fresh certificate for the graphs in `bundle`, whose every blob is checked on the way.

    source: where the model is found. Without one only a built-in model is loaded: a bundle may come from anywhere, and
    importing what it names would run its author's code.
    Raises UnknownModel when a source is needed, PlanError or DigestMismatch for a damaged bundle, ParityFailed when its
    graphs are not this model's.
    """
    for _ in bundle.blobs():
        pass
    plan, manifest = bundle.plan, bundle.manifest
    if source is None and manifest.model not in MODELS:
        raise UnknownModel(f"the bundle's model is {manifest.model!r}; if you trust that code, name it with --model")
    first, label = plan.examples.fields[0], plan.examples.fields[-1]
    model = Model(load(source or manifest.model, first.shape, label.high))
    if model.schema != plan.schema:
        raise ParityFailed(f"model {manifest.model} has other parameters today than when the bundle was exported")
    algorithm = create(manifest.algorithm.name, manifest.algorithm.settings)
    graphs = {fmt: {name: bundle.read(ref) for name, ref in refs.items()} for fmt, refs in plan.graphs.items()}
    return certify(model, algorithm, plan, graphs)
