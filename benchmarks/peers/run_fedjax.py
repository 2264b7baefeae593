"""FedJAX with its own FedAvg and its backend `jit`, the default on a CPU.

It compiles in the first round, which does not count. It fills a client's last batch with other examples of the client,
so that all batches have one shape.
"""

import importlib.metadata
import os
import sys
from collections.abc import Iterable

# XLA makes a thread for each core that the process may use.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from fedjax.core.client_datasets import Examples, ShuffleRepeatBatchHParams  # noqa: E402
from turns import Turns, Workload  # noqa: E402


def main() -> None:
    workload = Workload.read(sys.argv[1])
    model = _model(workload)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(workload.client_lr),
        fedjax.optimizers.sgd(1.0),
        ShuffleRepeatBatchHParams(batch_size=workload.batch_size),
    )
    state = algorithm.init(_weights(workload))

    def loss() -> float:
        images, labels = workload.probe
        batch = {"x": _channels_last(images), "y": labels}
        return float(model.train_loss(batch, model.apply_for_eval(state.params, batch)).mean())

    turns = Turns(importlib.metadata.version("fedjax"), loss)

    class Client(fedjax.ClientDataset):
        """A client whose batches are counted."""

        def shuffle_repeat_batch(self, hparams: ShuffleRepeatBatchHParams) -> Iterable[Examples]:  # type: ignore[override]
            for batch in super().shuffle_repeat_batch(hparams):
                turns.steps += 1
                yield batch

    for number in turns:
        cohort, clients = workload.cohorts[number], []
        keys = jax.random.split(jax.random.PRNGKey(number), len(cohort))
        for index, key in zip(cohort, keys, strict=True):
            images, labels = workload.clients[index]
            clients.append((index, Client({"x": _channels_last(images), "y": labels}), key))
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)


def _model(workload: Workload) -> fedjax.Model:
    def forward(batch: Examples) -> jax.Array:
        if workload.model == "logreg":
            return hk.Sequential([hk.Flatten(), hk.Linear(workload.classes)])(batch["x"])
        return hk.Sequential([
            hk.Conv2D(32, 3, padding="VALID"), jax.nn.relu, hk.Conv2D(64, 3, padding="VALID"), jax.nn.relu,
            hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), "VALID"), hk.Flatten(),
            hk.Linear(128), jax.nn.relu, hk.Linear(workload.classes),
        ])(batch["x"])  # fmt: skip

    return fedjax.create_model_from_haiku(
        hk.transform(forward),
        {"x": np.zeros((1, 28, 28, 1), np.float32), "y": np.zeros(1, np.int64)},
        lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
    )


def _channels_last(images: np.ndarray) -> np.ndarray:
    """Images (N, 1, 28, 28) as (N, 28, 28, 1), which with one channel is the same memory."""
    return images.reshape(-1, 28, 28, 1)


def _weights(workload: Workload) -> dict[str, dict[str, np.ndarray]]:
    """Torch's weights as Haiku names and lays them out."""
    arrays = list(workload.weights.values())
    if workload.model == "logreg":
        weight, bias = arrays
        return {"linear": {"w": weight.T, "b": bias}}
    conv1, bias1, conv2, bias2, dense1, bias3, dense2, bias4 = arrays
    return {
        "conv2_d": {"w": conv1.transpose(2, 3, 1, 0), "b": bias1},
        "conv2_d_1": {"w": conv2.transpose(2, 3, 1, 0), "b": bias2},
        # The dense layer reads channels first in torch, and last here.
        "linear": {"w": dense1.reshape(128, 64, 12, 12).transpose(2, 3, 1, 0).reshape(9216, 128), "b": bias3},
        "linear_1": {"w": dense2.T, "b": bias4},
    }


if __name__ == "__main__":
    main()
