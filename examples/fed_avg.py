"""A federated round to read: FedAvg on handwritten digits, with `fedcore` and NumPy only.

    python examples/fed_avg.py

The model is softmax regression. `train_on_device` is a device's part of a round, `federated_round` the coordinator's.
In Muster itself the first runs as exported graphs on devices, and HTTP lies between the two (docs/architecture.md).

Shapes: D parameters of the model, N examples of a device, B of a batch, P pixels, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcore.algorithms.algorithm import Algorithm, Broadcast, Gradient, Report, ServerStep, State, Vector
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.batching import StreamKey, batches

DIGITS = Path(__file__).parents[1] / "simulator" / "datasets" / "digits.npz"
P, C = 64, 10
Examples = tuple[NDArray[np.float64], NDArray[np.int64]]  # pixels (N, P) from 0 to 1, and classes (N,)


def scores(params_D: Vector, x_NP: Vector) -> Vector:
    """The scores (N, C) of every class. The model is one flat vector: C·P weights, then C biases."""
    return x_NP @ params_D[: C * P].reshape(C, P).T + params_D[C * P :]


def gradient(x_BP: Vector, y_B: Vector, mask_B: Vector) -> Gradient:
    """The mean loss on a batch and its gradient. Rows under mask 0 fill up a short last batch and do not count."""

    def grad(params_D: Vector) -> tuple[Vector, Vector, Vector]:
        exp_BC = np.exp(scores(params_D, x_BP))
        probability_BC = exp_BC / exp_BC.sum(1, keepdims=True)
        examples = mask_B.sum(keepdims=True)
        loss = -(np.log(probability_BC[np.arange(len(y_B)), y_B]) * mask_B).sum(keepdims=True) / examples
        error_BC = (probability_BC - np.eye(C)[y_B]) * mask_B[:, None] / examples
        return loss, np.concatenate([(error_BC.T @ x_BP).ravel(), error_BC.sum(0)]), examples

    return grad


def train_on_device(algorithm: Algorithm, broadcast: Broadcast, examples: Examples, key: StreamKey) -> Report:
    """What a device reports: named vectors, for FedAvg how far its local training moved the model."""
    x_NP, y_N = examples
    carries = {}
    for index, stage in enumerate(algorithm.passes):  # FedAvg has one pass: SGD over the local examples
        carry = stage.begin(broadcast)
        for rows, mask in batches(stage.loop, len(y_N), key, index):
            carry = stage.step(carry, broadcast, gradient(x_NP[rows], y_N[rows], mask))
        carries[stage.name] = carry
    return algorithm.report(broadcast, carries)


def federated_round(algorithm: Algorithm, state: State, cohort: Sequence[Examples], number: int) -> State:
    """The server state after one round: broadcast, local training, weighted mean, update."""
    broadcast = algorithm.broadcast(state)
    summed: dict[str, Vector] = {}
    summed_weight = 0.0
    for slot, examples in enumerate(cohort):
        report = train_on_device(algorithm, broadcast, examples, StreamKey(seed=0, round=number, slot=slot))
        weight = len(examples[1]) if algorithm.weighting == "examples" else 1
        for name, vector in report.items():  # the server needs no single report, only the weighted sum
            summed[name] = summed.get(name, 0) + weight * vector
        summed_weight += weight
    mean = {name: vector / summed_weight for name, vector in summed.items()}
    return algorithm.update(state, mean, ServerStep(devices=len(cohort)))


def main() -> None:
    """Train for 20 rounds; a device holds about three of the ten digits. Print the accuracy on held-out examples."""
    with np.load(DIGITS) as digits:
        x, y = digits["x"].reshape(-1, P) / 16, digits["y"].astype(np.int64)
    train, held_out = np.split(np.arange(len(y)), [1500])
    pieces = np.array_split(train[np.argsort(y[train], kind="stable")], 90)
    devices = [(x[rows], y[rows]) for rows in (np.concatenate(pieces[start::30]) for start in range(30))]
    algorithm = FedAvg(client_lr=0.3, epochs=2, batch_size=10)
    state = algorithm.init(np.zeros(C * P + C))
    random = np.random.default_rng(0)
    for number in range(1, 21):
        cohort = [devices[index] for index in random.choice(len(devices), 15, replace=False)]
        state = federated_round(algorithm, state, cohort, number)
        accuracy = (scores(state["params"], x[held_out]).argmax(1) == y[held_out]).mean()
        print(f"round {number:2}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
