"""One local step on every runtime against torch eager: forward, backward and the algorithm's update, on one thread.

Every runtime does the same step of FedAvg at batch 20, in turns of short blocks in one process; the least CPU time per
step counts. torch's is plain eager code: the user's module as it is, with torch's own dropout, and the same metrics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

from benchmarks.runner import DeviceStepOptions
from benchmarks.usage import cpu_s_of
from device_runtime.backends import BACKENDS, FORMATS
from device_runtime.capabilities import random_field
from device_runtime.runner import MOST_STEPS
from export.build import Graphs, build_plan
from export.model import Model
from export.models import MODELS, load
from fedcore.algorithms import create
from fedcore.plan import MASK, METRICS, NOISE, Plan, loop_graph, steps_graph
from muster.output import Say

LEARNING_RATE, BATCH = 0.1, 20
BLOCK_S = 0.2
EAGER = "torch"
# How many times torch's time a step may take; measurements behind them: docs/performance.md.
TARGETS: dict[str, dict[str, float]] = {
    "onnx": {
        "logreg": 1.0,
        "mlp": 1.0,
        "emnist_cnn": 1.0,
        "resnet18_gn": 1.3,
        "mobilenetv2_gn": 1.5,
        "char_lstm": 1.3,
        "word_lstm": 1.0,
        "transformer": 1.0,
    },
    "executorch": {
        "logreg": 2.46,
        "emnist_cnn": 3.36,
        "resnet18_gn": 2.43,
        "mobilenetv2_gn": 13.0,
        "char_lstm": 2.07,
        "word_lstm": 1.3,
        "transformer": 1.34,
    },
}


def run(options: DeviceStepOptions, say: Say) -> dict[str, Any]:
    """A step of every model on torch and on the runtimes of the formats, in turns.

    export_cpu_s: tracing and writing the graphs of the format. runtimes: their versions.
    """
    torch.set_num_threads(1)
    forms = options.formats or list(FORMATS)
    steps = [step for name in options.models or MODELS for step in _measure(name, forms, options.blocks, say)]
    runtimes = {FORMATS[form]: BACKENDS[FORMATS[form]]().runtime.split()[-1] for form in forms}
    return {"batch_size": BATCH, "runtimes": runtimes, "steps": steps}


def _measure(name: str, forms: Sequence[str], blocks: int, say: Say) -> list[dict[str, Any]]:
    model, random = Model(load(name)), np.random.default_rng(0)
    batch = {item.name: random_field(item, BATCH, random) for item in model.spec.fields}
    runs: dict[str, Callable[[], object]] = {EAGER: _eager(model, batch)}
    per_call = {EAGER: 1}
    costs: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for form in forms:
        say(f"{name}: export as {form}")
        started = time.process_time()
        plan, graphs = build_plan(model, create("fedavg", {"client_lr": LEARNING_RATE, "batch_size": BATCH}), (form,))
        costs[form] = time.process_time() - started
        sizes[form] = sum(map(len, graphs.values()))
        runs[form], per_call[form] = _exported(model, plan, form, graphs, batch)
    say(f"{name}: measure")
    best = {form: seconds / per_call[form] for form, seconds in _least(runs, blocks).items()}
    return [
        {
            "model": name,
            "backend": FORMATS.get(form, form),
            "cpu_ms": 1e3 * seconds,
            "ratio_to_eager": seconds / best[EAGER],
            "target": TARGETS.get(form, {}).get(name),
            "export_cpu_s": costs.get(form),
            "graph_bytes": sizes.get(form),
        }
        for form, seconds in best.items()
    ]


def _least(runs: dict[str, Callable[[], object]], blocks: int) -> dict[str, float]:
    """The least CPU seconds of one call of each, over blocks taken in turns."""
    best = dict.fromkeys(runs, math.inf)
    for _ in range(blocks):
        for name, call in runs.items():
            call()  # the caches hold another runtime's data
            until = time.process_time() + BLOCK_S
            while time.process_time() <= until:
                best[name] = min(best[name], cpu_s_of(call))
    return best


def _eager(model: Model, batch: dict[str, np.ndarray]) -> Callable[[], object]:
    """The step as torch code: flat vector in, flat vector and metric sums out."""
    spec, tensors = model.spec, {name: torch.from_numpy(value) for name, value in batch.items()}
    params, mask = torch.from_numpy(model.initial), torch.ones(BATCH)
    inputs, label = [tensors[item.name] for item in spec.inputs], tensors[spec.label.name]

    def step() -> object:
        leaves = {name: part.detach().requires_grad_() for name, part in model.tensors(params).items()}
        outputs = torch.func.functional_call(model.module, leaves, tuple(inputs))
        values = [spec.loss(outputs, label), *(metric(outputs, label) for metric in spec.metrics.values())]
        loss = (values[0] * mask).sum() / mask.sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        sums = torch.stack([mask.sum(), *((value.detach() * mask).sum() for value in values)])
        return params - LEARNING_RATE * parameters_to_vector(gradients), sums

    return step


def _exported(
    model: Model, plan: Plan, form: str, graphs: Graphs, batch: dict[str, np.ndarray]
) -> tuple[Callable[[], object], int]:
    """A call of the graph of steps, and the number of steps in a call."""
    name = loop_graph(plan.graphs[form], "train")
    step = BACKENDS[FORMATS[form]]().load(graphs[plan.graphs[form][name]], name)
    inputs = {f"example.{name}": value for name, value in batch.items()}
    inputs |= {MASK: np.ones(BATCH, np.float32), NOISE: np.arange(BATCH, dtype=np.int32)}
    sums, count = np.empty(len(plan.passes[0].metrics), np.float32), 1
    if name == steps_graph("train"):
        count = MOST_STEPS
        inputs = {name: np.stack([value] * count) for name, value in inputs.items()}
        sums = np.stack([sums] * count)
    inputs |= dict.fromkeys(("carry.params", "broadcast.params"), model.initial)
    outputs = {"next.params": np.empty_like(model.initial), METRICS: sums}
    return lambda: step.run(inputs, outputs), count
