"""Workloads of the engine's benchmarks: synthetic, of EMNIST's shape (28×28×1, 62 classes, 3,400 clients), FedAvg.

"bare" is the same forward and backward passes on ready tensors, one client after the other, without any federated
logic: the ratio to it says what the federated part costs, or what batching clients together gains.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch
from torch import nn

from export.model import Model, ModelSpec, cross_entropy
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import Algorithm, trips_of
from fedcore.batching import StreamKey, batches
from fedcore.plan import Field
from fedcore.validation import decoder
from simulator.engines.memory import single_precision
from simulator.engines.processes import Answer, Forked
from simulator.population import Population

CLIENTS, CLASSES, BATCH, CLIENT_LR = 3400, 62, 20, 0.1
_AT_ONCE = 10_000
_COHORT, _SECONDS = decoder(list[int]), decoder(float)


class Workload(msgspec.Struct, frozen=True):
    """A module, the size of its cohorts, and the least and the most examples of a client."""

    make: Callable[[], nn.Module]
    cohort: int
    examples: tuple[int, int]
    clients: int = CLIENTS

    def model(self) -> Model:
        """The module with its loss, and weights drawn under seed 0."""
        inputs, label = (Field("x", "float32", (1, 28, 28)),), Field("y", "int64", high=CLASSES)
        return Model(ModelSpec(self.make.__name__, self.make, cross_entropy, inputs, label))

    def population(self) -> Population:
        """The clients. Images are noise with the pattern of their class, which can be learnt."""
        random = np.random.default_rng(0)
        starts = np.concatenate([[0], np.cumsum(random.integers(*self.examples, self.clients, endpoint=True))])
        labels = random.integers(0, CLASSES, int(starts[-1]))
        patterns = random.random((CLASSES, 1, 28, 28), dtype=np.float32)
        images = random.random((len(labels), 1, 28, 28), dtype=np.float32)
        for start in range(0, len(labels), _AT_ONCE):
            part = images[start : start + _AT_ONCE]
            part += patterns[labels[start : start + _AT_ONCE]]
            part -= 1  # without a mean, local training is stable at the learning rate of the workloads
        return Population(tuple(map(str, range(self.clients))), {"x": images, "y": labels}, starts)


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

# The most clients of a cohort that are trained bare: each takes as long as the next, and 5,000 would take minutes.
BARE_CLIENTS = 100
GROWN, COHORTS = ("W1", "W3"), (50, 500, 5000)


def grown() -> dict[str, Workload]:
    """Workloads with cohorts of several sizes, by name."""
    return {
        f"{name}, cohort {size}": msgspec.structs.replace(WORKLOADS[name], cohort=size, clients=max(CLIENTS, size))
        for name in GROWN
        for size in COHORTS
        if size != WORKLOADS[name].cohort
    }


def steps_of(users: Population, cohort: Sequence[int]) -> int:
    """The local steps of a cohort in a round."""
    return int(np.ceil(users.sizes[list(cohort)] / BATCH).sum())


def fedavg() -> Algorithm:
    """FedAvg with one epoch of batches of 20."""
    return create("fedavg", {"batch_size": BATCH, "client_lr": CLIENT_LR})


@contextmanager
def bare_seconds(model: Model, users: Population, device: torch.device) -> Iterator[Callable[[list[int]], float]]:
    """A function for the seconds of a cohort's bare steps: in a forked process, with a GPU in this one."""
    if device.type != "cpu":
        yield lambda cohort: _bare(model, users, cohort, device)
        return

    def main(pipe: Connection) -> None:
        with contextlib.suppress(EOFError):  # the pipe is closed at the end
            while True:
                cohort = _COHORT.decode(pipe.recv_bytes())
                taken_s = msgspec.json.encode(_bare(model, users, cohort, device))
                pipe.send_bytes(msgspec.json.encode(Answer(msgspec.Raw(taken_s))))

    def seconds(cohort: list[int]) -> float:
        process.send(msgspec.json.encode(cohort))
        return _SECONDS.decode(process.answer().value)

    process = Forked(main)
    try:
        yield seconds
    finally:
        process.end()


@single_precision()
def _bare(model: Model, users: Population, cohort: Sequence[int], device: torch.device) -> float:
    """Seconds for the same steps, one client after the other, on tensors that are ready."""
    module = model.module.to(device)
    parameters = list(module.parameters())
    loop = trips_of(fedavg())[0].passes[0].loop
    steps = []
    for slot, client in enumerate(cohort):
        shard = {name: torch.from_numpy(array).to(device) for name, array in users.shard(client).items()}
        for rows, mask in batches(loop, int(users.sizes[client]), StreamKey(0, 1, slot), 0):
            real = torch.from_numpy(rows[mask == 1]).to(device)
            steps.append((shard["x"][real], shard["y"][real]))
    wait(device)
    start = clock(device)
    for x, y in steps:
        gradients = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=1e-6)
    wait(device)
    return clock(device) - start


def clock(device: torch.device) -> float:
    """Seconds: of this process's CPU time, or of the wall clock where a GPU computes."""
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def wait(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
