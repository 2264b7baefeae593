"""Bundles made by hand: graphs are opaque to the coordinator, so any bytes will do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from fedcore import algorithms, checkpoint
from fedcore.algorithms.rehearsal import rehearse
from fedcore.bundle import AlgorithmRef, Bundle, Certificate, Evidence, Footprint, Manifest, Parity
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, PassPlan, Plan
from fedcore.report import LOSS_COUNTS, LOSSES, ReportLayout, Segment, count_losses
from fedcore.schedule import Loop

START = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
GRAPHS = {name: name.encode() for name in ("train.begin", "train.step", "report")}


FOOTPRINT = Footprint(step_cpu_ms=2.0, peak_rss_mb=50.0, graph_bytes=3000)
EVIDENCE = Evidence(
    runtime="hand", version="1", tolerance=1e-5, parity=(Parity("train.step", 3, 1e-6, 1e-7),), footprint=FOOTPRINT
)


def make_plan(size=4, broadcast=None, segments=None, weighting="examples", formats=("onnx",), bounded=False):
    segments = segments or (
        Segment("delta", size, "mean"),
        Segment("weight", 1, "sum"),
        Segment("train.metrics", 2, "sum", ("examples", "loss")),
    )
    return Plan(
        name="hand-made",
        schema=ParamSchema((TensorSpec("w", (size,)),)),
        broadcast=broadcast or (VectorSpec("params", size),),
        examples=ExampleSpec((Field("x", "float32", (2,)),)),
        passes=(PassPlan("train", Loop(batch_size=2), (VectorSpec("params", size),), ("loss",)),),
        report=ReportLayout(segments, weighting, bounded),
        graphs={fmt: {name: BlobRef.of(graph) for name, graph in GRAPHS.items()} for fmt in formats},
    )


def make_bundle(
    folder: Path, plan=None, algorithm="fedavg", settings=None, start=START, *, state=None, evidence=None, graphs=()
):
    """A bundle; `evidence` by format is what its certificate holds, by default as much as the release check wants."""
    plan = plan or make_plan()
    state = checkpoint.encode(state or algorithms.create(algorithm, settings).init(start))
    certificate = msgspec.json.encode(Certificate("hand", evidence or dict.fromkeys(plan.graphs, EVIDENCE)))
    manifest = Manifest(
        name="hand-made",
        model="none",
        algorithm=AlgorithmRef(algorithm, settings or {}),
        plan=BlobRef.of(plan.encode()),
        state=BlobRef.of(state),
        certificate=BlobRef.of(certificate),
    )
    return Bundle.write(folder, manifest, [plan.encode(), state, certificate, *GRAPHS.values(), *graphs])


def make_evaluation_bundle(folder: Path, algorithm="evaluate", plan=None, **settings):
    """A bundle of an algorithm that evaluates the hand-made model, or that of a plan."""
    settings = {"metrics": "loss=0..10"} | settings
    (trip,) = rehearse(algorithms.create(algorithm, settings), START)
    segments = [
        *(Segment(name, vector.size, "mean") for name, vector in trip.report.items()),
        Segment("weight", 1, "sum"),
    ]
    layout = ReportLayout(tuple(segments), "uniform", "clip_norm" in settings)
    plan = msgspec.structs.replace(plan or make_plan(), broadcast=checkpoint.specs_of(trip.broadcast), report=layout)
    return make_bundle(folder, plan, algorithm, settings)


def evaluation_values(m):
    """What a device reports to an evaluation of the hand-made model when its own mean loss is at m of its range."""
    x, bins = 0.01, np.arange(20) == int(20 * m)
    return np.array([x, x * x, m, m * m, m * x, m * x * x, m * m * x * x, *bins, 1], np.float32)


def make_private_bundle(folder: Path, size=4, **settings):
    """A bundle whose reports are clipped as a whole, to the norm 2 if the settings of its algorithm name no other."""
    algorithm = {"weighting": "uniform", "clip_norm": 2.0} | settings
    segments = [Segment("delta", size, "mean"), Segment("weight", 1, "sum")]
    if "clip_quantile" in settings:
        segments.insert(1, Segment("clip_indicator", 1, "mean"))
    broadcast = (VectorSpec("params", size), VectorSpec("clip", 1))
    plan = make_plan(size, broadcast, tuple(segments), "uniform", bounded=True)
    return make_bundle(folder, plan, settings=algorithm, start=np.resize(START, size))


def counting_plan():
    """The hand-made plan, with counts of losses."""
    return make_plan(segments=(*make_plan().report.segments, LOSS_COUNTS))


def report_values(delta, weight, loss=0.0, plan=None, start=0.0):
    """The unweighted values of a report. loss: its sum in training. start: that of the first step."""
    layout = (plan or make_plan()).report
    parts = {one.name: np.array([weight, loss], np.float32) for one in layout.segments if one.labels}
    parts[LOSSES] = count_losses(np.float32([weight, start]), np.float32([weight, loss]))
    return layout.concatenate(parts | {layout.means[0].name: np.asarray(delta, np.float32)}, weight)


def report_vector(delta, weight, loss=0.0, plan=None, start=0.0):
    return (plan or make_plan()).report.weigh(report_values(delta, weight, loss, plan, start), weight)


def report_body(delta, weight, loss=0.0):
    return checkpoint.encode({"report": report_vector(delta, weight, loss)})
