"""A plain torch loop: what a researcher writes first, with state dicts and an optimizer object for every client."""

import copy
import sys

import torch
from torch import nn
from torch_models import examples, model, probe_loss
from turns import Turns, Workload


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
