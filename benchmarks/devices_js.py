"""Devices in TypeScript, on Node or in Chromium, against Python's: local training, packing, noise and masks.

Both do the same work in turns, each training on one thread; the least CPU time of a block counts, of all processes of a
runtime.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.js_runtimes import JsRuntime, Node, page, page_cost
from benchmarks.runner import DevicesJsOptions
from benchmarks.usage import cpu_s_of
from device_runtime.backends.backend import Arrays, Executable
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.capabilities import random_field
from device_runtime.runner import execute
from export.build import build_plan
from export.model import Model
from export.models import MODELS, load
from fedcore import checkpoint
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import Algorithm, trips_of
from fedcore.batching import StreamKey
from fedcore.params import Float32, Frozen
from fedcore.plan import Plan
from muster.output import Say
from secagg import packing
from secagg.masking import Mask, add_masks
from secagg.packing import PackedSegment

BATCH, LEAST_STEPS, MOST_STEPS = 20, 5, 1000
QUICK_S = 0.05
"""A training of the fewest steps that takes less is made as long as the most, so that its start does not count."""
WARM_S = 6.0
"""CPU seconds of the blocks of these, at least: V8 compiles what runs often twice, within 100,000 small steps."""
FIELD_BITS, IN_BITS, VARIANCE = 26, 16, 100
TRAINED = "emnist_cnn"
"""The model that the page's own cost is measured with, where it is among those asked for."""
TARGETS = {
    "node": {"run_ratio": 1.1, "outside_ms": 0.15, "mask_ratio": 5.0},
    "browser": {"step_ratio": 4.0, "mask_ratio": 5.0, "first_load_mb": 5.0, "ready_cpu_s": 3.0, "training_mb": 400.0},
}


def run(options: DevicesJsOptions, say: Say) -> dict[str, Any]:
    """Every model, the parts of a masked report, and a page. Raises FleetError where Node is missing, BrowserMissing.

    A step is warm, in CPU milliseconds. run_ratio: what ONNX Runtime takes of it, with the way there and back, to the
    same in Python; None in a browser, which tells a page no CPU time. outside_ms: what is spent outside of it, by the
    wall. load_s: CPU seconds to load all graphs, in a browser with its worker and engine.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if options.runtime == "node":
            with Node() as runtime:
                return _measured(options, folder, runtime, say)
        with page(folder) as opened:
            figures = _measured(options, folder, opened, say)
            say("page")
            names = [step["model"] for step in figures["steps"]]
            work = folder / (TRAINED if TRAINED in names else names[0])
            targets = figures.pop("targets")
            return figures | {"page": page_cost(opened.site, work, fed_avg(), options.blocks), "targets": targets}


def fed_avg() -> Algorithm:
    """The algorithm of all works."""
    return create("fedavg", {"batch_size": BATCH, "client_lr": 0.01})


def _measured(options: DevicesJsOptions, folder: Path, runtime: JsRuntime, say: Say) -> dict[str, Any]:
    steps = [_step(Work.write(name, folder, say), runtime, options.blocks, say) for name in options.models or MODELS]
    say("mask")
    secure = _secure(options, runtime)
    return {
        "engine": runtime.engine,
        "steps": steps,
        "dim": options.dim,
        "streams": options.neighbours + 1,
        "secure": secure,
        "mask_ratio": secure[-1]["ratio"],
        "targets": TARGETS[options.runtime],
    }


@dataclass(frozen=True, slots=True)
class Work:
    """The local training of a model: `train` runs it in Python, and `folder` has the same for other runtimes.

    runs: the CPU seconds of all runs of its graphs in Python, one after the other.
    """

    folder: Path
    steps: int
    load_s: float
    train: Callable[[], object]
    runs: list[float]

    @classmethod
    def write(cls, name: str, folder: Path, say: Say) -> Work:
        """Export the model, and write its work into a folder of its name."""
        say(f"{name}: export")
        model, algorithm = Model(load(name)), fed_avg()
        plan, blobs = build_plan(model, algorithm, ("onnx",))
        graphs = {graph: blobs[ref] for graph, ref in plan.graphs["onnx"].items()}
        executables: dict[str, Executable] = {}
        load_s = cpu_s_of(lambda: executables.update({name: OnnxRuntime().load(graphs[name], name) for name in graphs}))
        runs: list[float] = []
        timed = {name: _Timed(executable, runs) for name, executable in executables.items()}
        state = {key: np.asarray(vector) for key, vector in algorithm.init(model.initial).items()}
        broadcast = trips_of(algorithm)[0].broadcast(state)

        def train(examples: Mapping[str, NDArray[np.generic]]) -> None:
            execute(plan, dict(timed), broadcast, examples, StreamKey(0, 1, 0), frozen=model.frozen_vectors)

        train(_examples(plan, 1))
        few = _examples(plan, LEAST_STEPS)
        steps = MOST_STEPS if cpu_s_of(lambda: train(few)) < QUICK_S else LEAST_STEPS
        examples = _examples(plan, steps)
        _write(folder / name, plan, graphs, broadcast, model.frozen_vectors, examples)
        return cls(folder / name, steps, load_s, lambda: train(examples), runs)


class _Timed:
    """A graph, and the CPU seconds of its runs."""

    def __init__(self, graph: Executable, runs: list[float]) -> None:
        self._graph, self._runs = graph, runs

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        self._runs.append(cpu_s_of(lambda: self._graph.run(inputs, outputs)))


def _examples(plan: Plan, steps: int) -> dict[str, NDArray[np.generic]]:
    random = np.random.default_rng(0)
    return {item.name: random_field(item, BATCH * steps, random) for item in plan.examples.fields}


def _step(work: Work, runtime: JsRuntime, blocks: int, say: Say) -> dict[str, Any]:
    """Load and train, on both in turns; the least of the blocks after the first."""
    say(f"{work.folder.name}: load")
    js_load_s = runtime.load(work.folder).cpu_s
    say(f"{work.folder.name}: measure")
    python_s = python_run_s = js_s = js_run_s = outside_s = math.inf
    measured, spent_s = 0, 0.0 if work.steps == MOST_STEPS else WARM_S
    while measured < 1 + blocks or spent_s < WARM_S:
        work.runs.clear()
        python_s, python_run_s = min(python_s, cpu_s_of(work.train)), min(python_run_s, sum(work.runs))
        block = runtime.ask(train=None)
        js_s, js_run_s = min(js_s, block.cpu_s), min(js_run_s, block.answer["inside_cpu_s"])
        outside_s = min(outside_s, block.answer["outside_s"])
        measured, spent_s = measured + 1, spent_s + block.cpu_s
    return {
        "model": work.folder.name,
        "python_ms": 1e3 * python_s / work.steps,
        "js_ms": 1e3 * js_s / work.steps,
        "step_ratio": js_s / python_s,
        "run_ratio": js_run_s / python_run_s if js_run_s > 0 else None,
        "outside_ms": 1e3 * outside_s / work.steps,
        "python_load_s": work.load_s,
        "js_load_s": js_load_s,
    }


def _write(
    folder: Path,
    plan: Plan,
    graphs: Mapping[str, bytes],
    broadcast: Mapping[str, Float32],
    frozen: Mapping[str, Frozen],
    examples: Mapping[str, NDArray[np.generic]],
) -> None:
    """Write the work as other runtimes read it (`device_runtime/js/bench/blocks.ts`)."""
    (folder / "graphs").mkdir(parents=True)
    for graph, blob in graphs.items():
        (folder / "graphs" / graph).write_bytes(blob)
    (folder / "plan.json").write_bytes(plan.encode())
    (folder / "checkpoint.safetensors").write_bytes(checkpoint.encode(broadcast))
    (folder / "frozen.safetensors").write_bytes(checkpoint.encode_frozen(frozen))
    (folder / "key.json").write_text(json.dumps({"seed": "0", "round": "1", "slot": "0"}))
    np.savez(folder / "examples.npz", allow_pickle=False, **examples)


def _secure(options: DevicesJsOptions, runtime: JsRuntime) -> list[dict[str, Any]]:
    """Packing without and with noise, and masking what was packed; the least of the blocks."""
    vector = np.zeros(options.dim, np.float32)
    masks = [Mask(bytes([place]) * 32, -1 if place % 2 else 1) for place in range(options.neighbours + 1)]
    words = packing.encode((_segment(options.dim, 0),), vector, 1, 1)
    works: dict[str, tuple[Callable[[], object], dict[str, object]]] = {
        part: (
            partial(packing.encode, (_segment(options.dim, noise),), vector, 1, 1),
            {"pack": {"size": options.dim, "noise": noise}},
        )
        for part, noise in {"pack": 0, "pack with noise": VARIANCE}.items()
    }
    works["mask"] = lambda: add_masks(words, masks), {"mask": len(masks)}
    costs = []
    for part, (work, request) in works.items():
        python_s = js_s = math.inf
        for _ in range(options.blocks):
            python_s = min(python_s, cpu_s_of(work))
            js_s = min(js_s, runtime.ask(**request).cpu_s)
        costs.append({"part": part, "python_s": python_s, "js_s": js_s, "ratio": js_s / python_s})
    return costs


def _segment(size: int, noise: int) -> PackedSegment:
    """Values in [-1, 1] of which 0 is one of the steps, as the noise of devices needs it."""
    half = 2 ** (IN_BITS - 1)
    return PackedSegment(size, FIELD_BITS, IN_BITS, -half / (half - 1), 1.0, 1.0, noise=noise)
