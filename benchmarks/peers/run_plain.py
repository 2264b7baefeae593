"""A plain torch loop, what a researcher writes first, with state dicts and an optimizer object for every client.

The models of the workloads too, which other peers that use torch train.
"""

import copy
import sys

import torch
from torch import Tensor, nn
from turns import Turns, Workload

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


def main() -> None:
    workload = Workload.read(sys.argv[1])
    torch.manual_seed(0)
    server = model(workload)
    turns = Turns(torch.__version__, lambda: probe_loss(workload, server))
    for number in turns:
        cohort = workload.cohorts[number]
        total = sum(len(workload.clients[index][1]) for index in cohort)
        mean = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
        for index in cohort:
            images, labels = examples(workload, index)
            client = copy.deepcopy(server)
            optimizer = torch.optim.SGD(client.parameters(), lr=workload.client_lr)
            for rows in torch.randperm(len(labels)).split(workload.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(client(images[rows]), labels[rows]).backward()
                optimizer.step()
                turns.steps += 1
            for name, value in client.state_dict().items():
                mean[name] += value * (len(labels) / total)
        server.load_state_dict(mean)


if __name__ == "__main__":
    main()
