"""A task without graphs to run, for loading a coordinator: the devices of such a task report zeros."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from coordinator.store.tasks import TaskSettings
from fedcore import algorithms, checkpoint
from fedcore.bundle import AlgorithmRef, Bundle, Certificate, Evidence, Footprint, Manifest, Parity
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, PassPlan, Plan
from fedcore.report import ReportLayout, Segment
from fedcore.schedule import Loop
from muster.local.server import LocalCoordinator, local_coordinator

FORMAT = "onnx"


@contextmanager
def null_coordinator(size: int, task: TaskSettings, **settings: Any) -> Iterator[tuple[LocalCoordinator, str]]:
    """A coordinator process with one such task on `size` parameters, in a temporary folder; the task's id.

    `settings` are the coordinator's. Raises ServerError.
    """
    with tempfile.TemporaryDirectory(prefix="muster-null-") as folder:
        bundle = null_bundle(Path(folder) / "plan", size)
        with local_coordinator(Path(folder), **settings) as local:
            yield local, local.store.register_task(bundle, task).id


def null_bundle(folder: Path, size: int) -> Bundle:
    """A bundle of FedAvg on `size` parameters, weighing devices alike. Its graphs are text, and never run."""
    params = VectorSpec("params", size)
    graphs = {name: name.encode() for name in ("train.begin", "train.step", "report")}
    metrics = Segment("train.metrics", 2, "sum", ("examples", "loss"))
    plan = Plan(
        name="null",
        schema=ParamSchema((TensorSpec("w", (size,)),)),
        broadcast=(params,),
        examples=ExampleSpec((Field("x", "float32", (1,)),)),
        passes=(PassPlan("train", Loop(batch_size=1), (params,), ("loss",)),),
        report=ReportLayout((Segment("delta", size, "mean"), Segment("weight", 1, "sum"), metrics), "uniform"),
        graphs={FORMAT: {name: BlobRef.of(graph) for name, graph in graphs.items()}},
    ).encode()
    algorithm = AlgorithmRef("fedavg", {"weighting": "uniform"})
    start = np.zeros(size, np.float32)
    state = checkpoint.encode(algorithms.create(algorithm.name, algorithm.settings).init(start))
    footprint = Footprint(step_cpu_ms=1.0, peak_rss_mb=1.0, graph_bytes=sum(map(len, graphs.values())))
    parity = (Parity("train.step", 1, 0.0, 0.0),)
    evidence = Evidence(runtime="none", version="none", tolerance=1.0, parity=parity, footprint=footprint)
    certificate = msgspec.json.encode(Certificate("none", {FORMAT: evidence}))
    manifest = Manifest(
        name="null",
        model="none",
        algorithm=algorithm,
        plan=BlobRef.of(plan),
        state=BlobRef.of(state),
        certificate=BlobRef.of(certificate),
    )
    return Bundle.write(folder, manifest, [plan, state, certificate, *graphs.values()])
