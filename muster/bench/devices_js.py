"""Devices in TypeScript on Node against Python's: local training, packing, noise and masks.

Both do the same work in turns, each on one thread in a process of its own; the least CPU time of a block counts.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Self, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.footprint import random_field
from device_runtime.runner import execute
from export.build import build_plan
from export.model import Model
from export.models import MODELS, load
from fedcore import checkpoint
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import trips_of
from fedcore.batching import StreamKey
from fedcore.params import Float32
from fedcore.plan import Plan
from muster.bench.options import DevicesJsOptions
from muster.output import Say
from secagg import packing
from secagg.masking import Mask, add_masks
from secagg.packing import PackedSegment
from simulator.fleet import node

BATCH, LEAST_STEPS, MOST_STEPS = 20, 5, 100
QUICK_S = 0.05
"""A training of the fewest steps that takes less is made as long as the most, so that its start does not count."""
FIELD_BITS, IN_BITS, VARIANCE = 26, 16, 100
TARGETS = {"step_ratio": 1.1, "outside_ms": 0.15, "mask_ratio": 5.0}


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """A step of one model: CPU milliseconds, and those of them that Node spends outside of ONNX Runtime."""

    model: str
    python_ms: float
    node_ms: float
    step_ratio: float
    outside_ms: float


class SumCost(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a secure round: CPU seconds."""

    part: str
    python_s: float
    node_s: float
    ratio: float


class DevicesJs(msgspec.Struct, frozen=True, kw_only=True):
    """All models, and the parts of a masked report of `dim` values under so many streams."""

    engine: str
    steps: list[StepCost]
    dim: int
    streams: int
    secure: list[SumCost]
    mask_ratio: float
    targets: dict[str, float]


def run(options: DevicesJsOptions, say: Say) -> DevicesJs:
    """Measure every model, then the secure part. Raises FleetError where Node is missing."""
    with tempfile.TemporaryDirectory() as folder, _Node() as worker:
        steps = [_steps(name, Path(folder) / name, worker, options.blocks, say) for name in options.models or MODELS]
        say("mask")
        secure = _secure(options, worker)
        return DevicesJs(
            engine=worker.engine,
            steps=steps,
            dim=options.dim,
            streams=options.neighbours + 1,
            secure=secure,
            mask_ratio=secure[-1].ratio,
            targets=TARGETS,
        )


class _Node:
    """The process of Node: it answers what is asked, in turn."""

    def __init__(self) -> None:
        script = str(node.FOLDER / "src" / "node" / "bench.ts")
        self._process = subprocess.Popen(
            [node.program(), "--no-warnings", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._asked, self._answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)

    def __enter__(self) -> Self:
        self.engine: str = self.ask(engine=None)["engine"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, **what: object) -> dict[str, Any]:
        self._asked.write(json.dumps(what) + "\n")
        self._asked.flush()
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer


def _steps(name: str, folder: Path, worker: _Node, blocks: int, say: Say) -> StepCost:
    say(f"{name}: export")
    model, algorithm = Model(load(name)), create("fedavg", {"batch_size": BATCH, "client_lr": 0.01})
    plan, blobs = build_plan(model, algorithm, ("onnx",))
    graphs = {graph: blobs[ref] for graph, ref in plan.graphs["onnx"].items()}
    executables = {graph: OnnxRuntime().load(blob, graph) for graph, blob in graphs.items()}
    state = {key: np.asarray(vector) for key, vector in algorithm.init(model.initial).items()}
    broadcast = trips_of(algorithm)[0].broadcast(state)
    random, key = np.random.default_rng(0), StreamKey(0, 1, 0)
    examples = {item.name: random_field(item, BATCH * MOST_STEPS, random) for item in plan.examples.fields}

    def train(steps: int) -> float:
        some = {field: values[: BATCH * steps] for field, values in examples.items()}
        return _cpu_s(lambda: execute(plan, dict(executables), broadcast, some, key, frozen=model.frozen_vectors))

    train(1)
    steps = MOST_STEPS if train(LEAST_STEPS) < QUICK_S else LEAST_STEPS
    some = {field: values[: BATCH * steps] for field, values in examples.items()}
    _write(folder, plan, graphs, broadcast, model.frozen_vectors, some)
    worker.ask(load=str(folder))
    say(f"{name}: measure")
    python_s, node_s, outside_s = math.inf, math.inf, math.inf
    for _ in range(blocks + 1):
        python_s = min(python_s, train(steps))
        found = worker.ask(train=None)
        node_s = min(node_s, found["cpu_s"])
        outside_s = min(outside_s, found["cpu_s"] - found["inside_s"])
    return StepCost(
        model=name,
        python_ms=1e3 * python_s / steps,
        node_ms=1e3 * node_s / steps,
        step_ratio=node_s / python_s,
        outside_ms=1e3 * outside_s / steps,
    )


def _write(
    folder: Path,
    plan: Plan,
    graphs: Mapping[str, bytes],
    broadcast: Mapping[str, Float32],
    frozen: Mapping[str, Float32],
    examples: Mapping[str, NDArray[np.generic]],
) -> None:
    """Write the work as Node reads it (`device_runtime/js/src/node/work.ts`)."""
    (folder / "graphs").mkdir(parents=True)
    for graph, blob in graphs.items():
        (folder / "graphs" / graph).write_bytes(blob)
    (folder / "plan.json").write_bytes(plan.encode())
    (folder / "checkpoint.safetensors").write_bytes(checkpoint.encode(broadcast))
    (folder / "frozen.safetensors").write_bytes(checkpoint.encode(frozen))
    (folder / "key.json").write_text(json.dumps({"seed": "0", "round": "1", "slot": "0"}))
    np.savez(folder / "examples.npz", allow_pickle=False, **examples)


def _secure(options: DevicesJsOptions, worker: _Node) -> list[SumCost]:
    """Packing without and with noise, and masking; the least of the blocks."""
    vector = np.zeros(options.dim, np.float32)
    masks = [Mask(bytes([place]) * 32, -1 if place % 2 else 1) for place in range(options.neighbours + 1)]
    words = packing.encode((_segment(options.dim, 0),), vector, 1, 1)
    works: dict[tuple[str, int, str], Callable[[], object]] = {
        ("pack", 0, "pack_s"): lambda: packing.encode((_segment(options.dim, 0),), vector, 1, 1),
        ("pack with noise", VARIANCE, "pack_s"): lambda: packing.encode(
            (_segment(options.dim, VARIANCE),), vector, 1, 1
        ),
        ("mask", 0, "mask_s"): lambda: add_masks(words, masks),
    }
    costs = []
    for (part, noise, what), work in works.items():
        python_s = node_s = math.inf
        for _ in range(options.blocks):
            python_s = min(python_s, _cpu_s(work))
            asked = {"size": options.dim, "noise": noise, "streams": len(masks)}
            node_s = min(node_s, worker.ask(mask=asked)[what])
        costs.append(SumCost(part=part, python_s=python_s, node_s=node_s, ratio=node_s / python_s))
    return costs


def _segment(size: int, noise: int) -> PackedSegment:
    """Values in [-1, 1] of which 0 is one of the steps, as the noise of devices needs it."""
    half = 2 ** (IN_BITS - 1)
    return PackedSegment(size, FIELD_BITS, IN_BITS, -half / (half - 1), 1.0, 1.0, noise=noise)


def _cpu_s(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started
