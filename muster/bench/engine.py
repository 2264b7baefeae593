"""Rounds of the vectorised engine against bare torch steps, in one run.

Workloads are synthetic, of EMNIST's shape (28×28×1, 62 classes, 3,400 clients). "bare" is the same forward and
backward passes on ready tensors, one client after the other, without any federated logic: the ratio says what the
federated part costs, or what batching clients together gains. On a CPU times are CPU seconds of one thread, on a GPU
wall seconds; the median over the rounds counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import nn

from export.model import Model, ModelSpec, cross_entropy
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import trips_of
from fedcore.batching import StreamKey, batches
from fedcore.plan import Field
from muster.bench.options import EngineOptions
from muster.output import Say
from simulator.engine import Engine
from simulator.engines.calibration import Task
from simulator.engines.choice import Wanted, choose
from simulator.engines.computing import Computing
from simulator.population import Population

CLIENTS, CLASSES, BATCH = 3400, 62, 20


class Workload(msgspec.Struct, frozen=True):
    """A module, the size of its cohorts, and the least and the most examples of a client."""

    make: Callable[[], nn.Module]
    cohort: int
    examples: tuple[int, int]


class WorkloadTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one round, and of the same steps with nothing around them."""

    seconds_per_round: float
    bare_seconds: float
    ratio_to_bare: float


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The workloads by name. gpu: its name, where one computed."""

    engine: str
    device: str
    gpu: str | None
    clock: str
    workloads: dict[str, WorkloadTime]


def logreg() -> nn.Module:
    """Logistic regression, 48,670 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, CLASSES))


def cnn() -> nn.Module:
    """The seed paper's CNN for EMNIST without its dropout, 1,206,590 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, CLASSES),
    )  # fmt: skip


WORKLOADS = {
    "W1": Workload(cnn, 50, (100, 300)),
    "W2": Workload(logreg, 50, (100, 300)),
    "W3": Workload(logreg, 500, (10, 20)),
}


def run(options: EngineOptions, say: Say) -> EngineTimes:
    """Measure every workload."""
    torch.set_num_threads(1)
    device = torch.device(options.device)
    found = {}
    for name in WORKLOADS:
        say(name)
        found[name] = _measure(name, options.engine, device, options.rounds)
    on_cpu = device.type == "cpu"
    return EngineTimes(
        engine=options.engine,
        device=options.device,
        gpu=None if on_cpu else torch.cuda.get_device_name(device),
        clock="CPU seconds" if on_cpu else "wall seconds",
        workloads=found,
    )


def _measure(name: str, kind: Wanted, device: torch.device, rounds: int) -> WorkloadTime:
    workload = WORKLOADS[name]
    inputs, label = (Field("x", "float32", (1, 28, 28)),), Field("y", "int64", high=CLASSES)
    model, users = Model(ModelSpec(name, workload.make, cross_entropy, inputs, label)), _population(workload.examples)
    algorithm = create("fedavg", {"batch_size": BATCH})
    choice = choose(kind, Task(model, algorithm, users, rounds * workload.cohort), Computing(str(device)))
    engine = Engine(model, algorithm, users, computing=choice.computing)
    ours, bare = [], []
    for number in range(rounds + 1):
        cohort = users.sample(workload.cohort, 0, number)
        start = _clock(device)
        engine.run_round(number, cohort)
        _wait(device)
        ours.append(_clock(device) - start)
        bare.append(_bare(model, users, cohort, device))
    # The first round warms caches and allocators.
    seconds, reference = statistics.median(ours[1:]), statistics.median(bare[1:])
    return WorkloadTime(seconds_per_round=seconds, bare_seconds=reference, ratio_to_bare=seconds / reference)


def _population(examples: tuple[int, int]) -> Population:
    random = np.random.default_rng(0)
    counts = random.integers(*examples, CLIENTS, endpoint=True)
    starts = np.concatenate([[0], np.cumsum(counts)])
    # One pool, shared: the arithmetic does not depend on the pixels, and 3,400 clients fit in memory.
    pool = random.random((int(starts[-1]), 1, 28, 28), dtype=np.float32)
    labels = random.integers(0, CLASSES, int(starts[-1]))
    return Population(tuple(map(str, range(CLIENTS))), {"x": pool, "y": labels}, starts)


def _bare(model: Model, users: Population, cohort: list[int], device: torch.device) -> float:
    """Seconds for the same steps, one client after the other, on tensors that are ready."""
    module = model.module.to(device)
    parameters = list(module.parameters())
    loop = trips_of(create("fedavg", {"batch_size": BATCH}))[0].passes[0].loop
    steps = []
    for slot, client in enumerate(cohort):
        shard = {name: torch.from_numpy(array).to(device) for name, array in users.shard(client).items()}
        for rows, mask in batches(loop, int(users.sizes[client]), StreamKey(0, 1, slot), 0):
            real = torch.from_numpy(rows[mask == 1]).to(device)
            steps.append((shard["x"][real], shard["y"][real]))
    _wait(device)
    start = _clock(device)
    for x, y in steps:
        gradients = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=1e-6)
    _wait(device)
    return _clock(device) - start


def _clock(device: torch.device) -> float:
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
