"""From a model and an algorithm to a plan bundle: capture, write, certify, put together."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import torch

from export.capture import capture_begin, capture_report, capture_step
from export.model import Model
from export.onnx import to_onnx
from export.parity import certify
from fedcore.algorithms.algorithm import Algorithm
from fedcore.bundle import AlgorithmRef, Bundle, Manifest
from fedcore.checkpoint import encode
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, PassPlan, Plan
from fedcore.report import WEIGHT, ReportLayout, Segment


def export_bundle(model: Model, algorithm: Algorithm, folder: Path, source: str | None = None) -> Bundle:
    """Trace, write and certify every graph, and write the bundle to `folder`.

    source: how `muster` finds the model again, a built-in name or `package.module:function`.
    Raises ExportError (see export/errors.py).
    """
    state = {name: vector.numpy() for name, vector in algorithm.init(torch.from_numpy(model.initial)).items()}
    plan, graphs = build_plan(model, algorithm)
    certificate = msgspec.json.encode(certify(model, algorithm, graphs))
    blobs = [plan.encode(), encode(state), certificate]
    settings = dataclasses.asdict(algorithm)  # type: ignore[call-overload]
    manifest = Manifest(
        name=plan.name,
        model=source or model.spec.name,
        algorithm=AlgorithmRef(algorithm.name, settings),
        plan=BlobRef.of(blobs[0]),
        state=BlobRef.of(blobs[1]),
        certificate=BlobRef.of(blobs[2]),
    )
    return Bundle.write(folder, manifest, [*blobs, *graphs.values()])


def build_plan(model: Model, algorithm: Algorithm) -> tuple[Plan, dict[str, bytes]]:
    """The plan and its ONNX graphs by name. Raises UnsupportedOperator or DynamicControlFlow."""
    received = algorithm.broadcast(algorithm.init(torch.from_numpy(model.initial)))
    broadcast = tuple(VectorSpec(name, vector.numel()) for name, vector in received.items())
    graphs: dict[str, bytes] = {}
    passes, carries, metrics = [], {}, []
    for item in algorithm.passes:
        begin = capture_begin(item, broadcast)
        carries[item.name] = begin.specs
        graphs[f"{item.name}.begin"] = to_onnx(begin)
        graphs[f"{item.name}.step"] = to_onnx(capture_step(model, item, broadcast, begin.specs))
        passes.append(PassPlan(item.name, item.loop, begin.specs, model.metrics))
        metrics.append(Segment(f"{item.name}.metrics", len(model.metrics), "sum", model.metrics))
    report = capture_report(algorithm, broadcast, carries)
    graphs["report"] = to_onnx(report)
    segments = [Segment(spec.name, spec.size, "mean") for spec in report.specs]
    plan = Plan(
        name=f"{model.spec.name}-{algorithm.name}",
        schema=model.schema,
        broadcast=broadcast,
        examples=ExampleSpec(model.spec.fields),
        passes=tuple(passes),
        report=ReportLayout((*segments, Segment(WEIGHT, 1, "sum"), *metrics), algorithm.weighting),
        graphs={"onnx": {name: BlobRef.of(graph) for name, graph in graphs.items()}},
    )
    return plan, graphs
