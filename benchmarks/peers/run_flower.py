"""Flower's simulation on Ray, with its FedAvg and the client of its quickstart for torch.

Ray has one CPU and a client needs one, so there is one actor. There is a node for each place in a cohort, not for each
client, which costs Flower less. An actor reads all examples once, and batches are slices of ready tensors, without a
data loader.
"""

import functools
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from run_plain import examples, model, probe_loss
from torch import nn
from turns import Turns, Workload

client_app = ClientApp()
read = functools.lru_cache(maxsize=1)(Workload.read)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    workload = read(config["folder"])
    index = workload.cohorts[config["server-round"] - 1][context.node_config["partition-id"]]
    images, labels = examples(workload, index)
    module = model(workload)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=workload.client_lr)
    steps = 0
    order = torch.Generator().manual_seed(index)  # the same orders in every run
    for rows in torch.randperm(len(labels), generator=order).split(workload.batch_size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(images[rows]), labels[rows]).backward()
        optimizer.step()
        steps += 1
    metrics = MetricRecord({"num-examples": len(labels), "steps": steps})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


class InTurns(FedAvg):
    """FedAvg that waits for its turn before each round, and counts steps."""

    def __init__(self, turns: Turns, rounds: Iterator[int], nodes: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_available_nodes=nodes)
        self._turns, self._rounds, self.arrays = turns, rounds, None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        next(self._rounds)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        answers = list(replies)
        self._turns.steps += sum(int(reply.content["metrics"]["steps"]) for reply in answers if reply.has_content())
        self.arrays, metrics = super().aggregate_train(server_round, answers)
        return self.arrays, metrics


def main() -> None:
    folder = sys.argv[1]
    workload = Workload.read(folder)
    module = model(workload)

    def loss() -> float:
        module.load_state_dict(strategy.arrays.to_torch_state_dict())
        return probe_loss(workload, module)

    turns = Turns(importlib.metadata.version("flwr"), loss)
    rounds, nodes = iter(turns), len(workload.cohorts[0])
    strategy = InTurns(turns, rounds, nodes)
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        initial, config = ArrayRecord(module.state_dict()), ConfigRecord({"folder": folder})
        strategy.start(grid, initial, num_rounds=len(workload.cohorts), train_config=config)
        next(rounds, None)

    resources = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, nodes, backend_config=resources)


if __name__ == "__main__":
    # Imported by name, as Ray's actors do once; whatever is in `__main__` would be sent with every message.
    import run_flower

    run_flower.main()
