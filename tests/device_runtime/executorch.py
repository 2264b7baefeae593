"""ExecuTorch programs for tests: tiny torch functions, exported as the contract of the backend asks."""

import json
import warnings
from importlib import import_module

import torch

from tests.device_runtime import linear

RATE = 0.1


class _Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *arguments):
        return self.function(*arguments)


def program(function, arguments, inputs, outputs, *, planned=False, delegate=False, ports=None):
    """A program's bytes. `planned`: the exporter gives inputs and outputs memory; `delegate`: XNNPACK does what it can.

    `ports` replaces the bytes that name the ports.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exir, passes = import_module("executorch.exir"), import_module("executorch.exir.passes")
        xnnpack = import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
        names = ports or json.dumps({"inputs": inputs, "outputs": outputs}).encode()
        arguments = tuple(value.clone() for value in arguments)  # torch takes inputs that are one object for one input
        edge = exir.to_edge_transform_and_lower(
            torch.export.export(_Function(function), arguments, strict=False),
            partitioner=[xnnpack.XnnpackPartitioner()] if delegate else [],
            constant_methods={"ports": torch.tensor(list(names), dtype=torch.uint8)},
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        planning = passes.MemoryPlanningPass(alloc_graph_input=planned, alloc_graph_output=planned)
        return edge.to_executorch(exir.ExecutorchBackendConfig(memory_planning_pass=planning)).buffer


def altered(graph, change):
    """A program's bytes after `change` of its methods, given by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serializer = import_module("executorch.exir._serialize._program")
    file = serializer.deserialize_pte_binary(graph)
    change({method.name: method for method in file.program.execution_plan})
    return bytes(serializer.serialize_pte_binary(file))


def doubler(**how):
    """d = c + c and square = c·c, for vectors of four."""
    return program(lambda c: (c + c, c * c), (torch.zeros(4),), ["c"], ["d", "square"], **how)


def step(w1, w2, x, y, mask):
    """One masked gradient step of a network 8-16-3 with tanh on squared error: the weights after it, and [n, loss]."""
    hidden = torch.tanh(x @ w1)
    error = (hidden @ w2 - y) * mask.unsqueeze(1)
    n = mask.sum()
    grad2 = hidden.t() @ error / n
    grad1 = x.t() @ ((error @ w2.t()) * (1 - hidden * hidden)) / n
    metrics = torch.stack([n, 0.5 * (error * error).sum()])
    return w1 - RATE * grad1, w2 - RATE * grad2, metrics


def linear_graphs():
    """The five programs of the plan of `linear`."""
    vector, metrics = torch.zeros(linear.D), ["metrics"]
    batch = torch.zeros(4, linear.D), torch.zeros(4), torch.zeros(4)
    fields = ["example.x", "example.y", "mask"]

    def gradient(params, x, y, mask):
        masked = (x @ params.unsqueeze(1) - y.unsqueeze(1)).squeeze(1) * mask
        sums = torch.stack([mask.sum(), 0.5 * (masked * masked).sum()])
        return (masked.unsqueeze(0) @ x).squeeze(0), sums

    def train(params, x, y, mask):
        total, sums = gradient(params, x, y, mask)
        return params - linear.LEARNING_RATE * total / sums[0], sums

    def sweep(carry, params, x, y, mask):
        total, sums = gradient(params, x, y, mask)
        return carry + total, sums

    def report(params, trained, swept):
        return trained - params, swept.clone()

    params, summed = "broadcast.params", "carry.gradient_sum"
    last = [params, "train.carry.params", "sweep.carry.gradient_sum"]
    return {
        "train.begin": program(lambda p: (p.clone(),), (vector,), [params], ["next.params"]),
        "train.step": program(train, (vector, *batch), ["carry.params", *fields], ["next.params", *metrics]),
        "sweep.begin": program(lambda p: (p - p,), (vector,), [params], ["next.gradient_sum"]),
        "sweep.step": program(
            sweep, (vector, vector, *batch), [summed, params, *fields], ["next.gradient_sum", *metrics]
        ),
        "report": program(report, (vector, vector, vector), last, ["delta", "gradient"]),
    }
