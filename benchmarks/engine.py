"""The vectorised engine against bare torch steps, in one run: one JSON line.

    python benchmarks/engine.py [--device cpu|cuda] [--rounds N]

Workloads are synthetic, of EMNIST's shape (28×28×1, 62 classes, 3,400 clients). "bare" is the same forward and
backward passes on ready tensors, one client after the other, without any federated logic: the ratio says what the
federated part costs, or what batching clients together gains.
"""

import argparse
import json
import platform
import statistics
import time
from datetime import UTC, datetime

import numpy as np
import torch
from torch import nn

from export.model import Model, ModelSpec, cross_entropy
from fedcore.algorithms import create
from fedcore.batching import StreamKey, batches
from fedcore.plan import Field
from simulator.engine import Engine
from simulator.population import Population

CLIENTS, CLASSES, BATCH = 3400, 62, 20


def logreg() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, CLASSES))


def cnn() -> nn.Module:
    """The seed paper's CNN for EMNIST without its dropout, 1,206,590 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, CLASSES),
    )  # fmt: skip


WORKLOADS = {"W1": (cnn, 50, (100, 300)), "W2": (logreg, 50, (100, 300)), "W3": (logreg, 500, (10, 20))}


def population(sizes: tuple[int, int]) -> Population:
    random = np.random.default_rng(0)
    counts = random.integers(*sizes, CLIENTS, endpoint=True)
    starts = np.concatenate([[0], np.cumsum(counts)])
    # One pool, shared: the arithmetic does not depend on the pixels, and 3,400 clients fit in memory.
    pool = random.random((int(starts[-1]), 1, 28, 28), dtype=np.float32)
    return Population(
        tuple(map(str, range(CLIENTS))), {"x": pool, "y": random.integers(0, CLASSES, int(starts[-1]))}, starts
    )


def bare(model: Model, users: Population, cohort: list[int], device: torch.device) -> float:
    """Seconds for the same steps, one client after the other, on tensors that are ready."""
    module = model.module.to(device)
    parameters = list(module.parameters())
    loop = create("fedavg", {"batch_size": BATCH}).passes[0].loop
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


def measure(name: str, device: str, rounds: int) -> dict[str, float]:
    make, cohort, sizes = WORKLOADS[name]
    spec = ModelSpec(
        name, make, cross_entropy, (Field("x", "float32", (1, 28, 28)),), Field("y", "int64", high=CLASSES)
    )
    model, users = Model(spec), population(sizes)
    engine = Engine(model, create("fedavg", {"batch_size": BATCH}), users, device=device)
    target = torch.device(device)
    ours, plain = [], []
    for number in range(rounds + 1):
        chosen = users.sample(cohort, 0, number)
        start = _clock(target)
        engine.run_round(number, chosen)
        _wait(target)
        ours.append(_clock(target) - start)
        plain.append(bare(model, users, chosen, target))
    # The first round warms caches and allocators.
    seconds, reference = statistics.median(ours[1:]), statistics.median(plain[1:])
    return {"seconds_per_round": seconds, "bare_seconds": reference, "ratio_to_bare": seconds / reference}


def _clock(device: torch.device) -> float:
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    print(
        json.dumps(
            {
                "benchmark": "engine",
                "date": datetime.now(UTC).date().isoformat(),
                "device": arguments.device,
                "machine": machine,
                "torch": torch.__version__,
                "clock": "CPU seconds" if arguments.device == "cpu" else "wall seconds",
                "workloads": {name: measure(name, arguments.device, arguments.rounds) for name in WORKLOADS},
            }
        )
    )


if __name__ == "__main__":
    main()
