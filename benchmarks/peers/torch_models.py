"""The models of the workloads in torch, for the runners of peers that train with it."""

import torch
from torch import Tensor, nn
from turns import Workload

torch.set_num_threads(1)


def model(workload: Workload) -> nn.Module:
    """The model with its initial weights."""
    module = _module(workload.model, workload.classes)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in workload.weights.items()})
    return module


def _module(name: str, classes: int) -> nn.Module:
    if name == "logreg":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip


def examples(workload: Workload, index: int) -> tuple[Tensor, Tensor]:
    """The images and labels of a client, without a copy."""
    images, labels = workload.clients[index]
    return torch.from_numpy(images), torch.from_numpy(labels)


def probe_loss(workload: Workload, module: nn.Module) -> float:
    """The mean loss of the probe."""
    images, labels = (torch.from_numpy(array) for array in workload.probe)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(images), labels))
