"""Check a bundle from the outside: digests, and the certificate computed again from the model's source."""

from __future__ import annotations

from export.errors import ParityFailed
from export.model import Model
from export.models import load
from export.parity import certify
from fedcore.algorithms import create
from fedcore.bundle import Bundle, Certificate


def verify_bundle(bundle: Bundle) -> Certificate:
    """A fresh certificate for the graphs in `bundle`, whose every blob is checked on the way.

    Raises PlanError or DigestMismatch for a damaged bundle, ParityFailed when its graphs are not this model's.
    """
    for _ in bundle.blobs():
        pass
    plan, manifest = bundle.plan, bundle.manifest
    first, label = plan.examples.fields[0], plan.examples.fields[-1]
    model = Model(load(manifest.model, first.shape, label.high))
    if model.schema != plan.schema:
        raise ParityFailed(f"model {manifest.model} has other parameters today than when the bundle was exported")
    algorithm = create(manifest.algorithm.name, manifest.algorithm.settings)
    return certify(model, algorithm, {name: bundle.read(ref) for name, ref in plan.graphs["onnx"].items()})
