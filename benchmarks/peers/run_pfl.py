"""pfl-research, as its own benchmarks use it: the simulated backend in one process, and its adapter of torch models.

It evaluates only in the first round, which does not count: pfl does so in round 0 whatever its frequency. Users'
tensors are ready, so nothing is converted, and pfl does not shuffle them.
"""

import importlib.metadata
import sys
import types
from collections.abc import Iterator

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from run_plain import examples, model, probe_loss
from torch import Tensor, nn
from turns import Turns, Workload


class EveryRound(TrainingProcessCallback):
    """Waits for its turn before each round, and stops when there is none."""

    def __init__(self, turns: Iterator[int]) -> None:
        self._turns = turns

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        next(self._turns)
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        return next(self._turns, None) is None, Metrics()


def main() -> None:
    workload = Workload.read(sys.argv[1])
    module = model(workload)
    turns = Turns(importlib.metadata.version("pfl"), lambda: probe_loss(workload, module))

    def loss(self: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        turns.steps += 1
        return nn.functional.cross_entropy(self(images), labels)

    def metrics(self: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        with torch.no_grad():
            total = nn.functional.cross_entropy(self(images), labels, reduction="sum")
        return {"loss": Weighted(float(total), len(labels))}

    module.loss, module.metrics = types.MethodType(loss, module), types.MethodType(metrics, module)
    users = iter([index for cohort in workload.cohorts for index in cohort])
    data = FederatedDataset(lambda index: Dataset(examples(workload, index), user_id=str(index)), lambda: next(users))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=len(workload.cohorts),
            evaluation_frequency=len(workload.cohorts),
            train_cohort_size=len(workload.cohorts[0]),
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_batch_size=workload.batch_size, local_num_epochs=1, local_learning_rate=workload.client_lr
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[EveryRound(iter(turns))],
    )


if __name__ == "__main__":
    main()
