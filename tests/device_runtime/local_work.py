"""A device's local training as files, for runtimes in other languages, and what Python's makes of it."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.runner import execute
from export.build import build_plan
from fedcore import checkpoint
from fedcore.algorithms.algorithm import trips_of
from fedcore.batching import StreamKey
from fedcore.compression import Compression, quantise
from fedcore.plan import Plan

EXAMPLES, BATCH = 23, 10
KEY = StreamKey(seed=2**53 + 3, round=1, slot=7)


def drawn(fields):
    """Random examples for the fields of a plan."""
    rng = np.random.default_rng(1)
    return {
        one.name: rng.integers(one.high or 2, size=(EXAMPLES, *one.shape)).astype(one.dtype)
        if one.dtype != "float32"
        else rng.random((EXAMPLES, *one.shape), np.float32)
        for one in fields
    }


@dataclass(frozen=True, slots=True)
class LocalWork:
    """A plan with its graphs by name, the vectors that a device receives, and its examples."""

    plan: Plan
    graphs: dict[str, bytes]
    broadcast: dict[str, Any]
    frozen: dict[str, Any]
    examples: dict[str, Any]

    @classmethod
    def of(cls, model, algorithm, examples, compress=""):
        """The first round of an algorithm with one trip, under a compression."""
        plan, blobs = build_plan(model, algorithm, ("onnx",), lambda form, doing: None)
        (trip,) = trips_of(algorithm)
        broadcast = {key: np.asarray(vector) for key, vector in trip.broadcast(algorithm.init(model.initial)).items()}
        graphs = {graph: blobs[ref] for graph, ref in plan.graphs["onnx"].items()}
        return cls(Compression.parse(compress).applied(plan), graphs, broadcast, model.frozen_vectors, examples)

    def write(self, folder, kept=None):
        """Write it as `device_runtime/js/bench/blocks.ts` reads it, and what the device keeps, if it does."""
        (folder / "graphs").mkdir(exist_ok=True)
        for graph, blob in self.graphs.items():
            (folder / "graphs" / graph).write_bytes(blob)
        (folder / "plan.json").write_bytes(self.plan.encode())
        (folder / "checkpoint.safetensors").write_bytes(checkpoint.encode(self.broadcast))
        (folder / "frozen.safetensors").write_bytes(checkpoint.encode_frozen(self.frozen))
        (folder / "key.json").write_text(json.dumps({"seed": str(KEY.seed), "round": str(KEY.round), "slot": "7"}))
        np.savez(folder / "examples.npz", **self.examples)
        if kept is not None:
            (folder / "kept.safetensors").write_bytes(checkpoint.encode(kept))

    def train(self, kept=None):
        """What Python's runner makes of it."""
        graphs = {graph: OnnxRuntime().load(blob, graph) for graph, blob in self.graphs.items()}
        return execute(self.plan, graphs, self.broadcast, self.examples, KEY, frozen=self.frozen, kept=kept)

    def body(self, result):
        """The body of an upload in the clear."""
        layout = self.plan.report
        report = layout.weigh(result.values, result.weight)
        return quantise(layout, report, KEY) if layout.bits else checkpoint.encode({"report": report})
