"""Recorded gradients of models that torch is hard to record with."""

import numpy as np
import pytest
import torch
from torch import nn

from export.model import Model, ModelSpec, accuracy, cross_entropy
from export.trial_examples import draw_examples
from fedcore.algorithms import create
from fedcore.plan import METRICS, Field
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.engines.graphs import export_graphs
from simulator.engines.oracle import CohortOracle
from simulator.engines.recorded.program import Programs
from simulator.population import Population
from tests.export import test_promises
from tests.simulator.reference import reference_round

CPU = torch.device("cpu")


class Layers(nn.Module):
    """Images (1, 8, 8) or tokens (6,) to 10 classes: `forward` is given."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.last = nn.Linear(64, 20), nn.Linear(20, 10)
        self.convolution, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)
        self.halves, self.images = nn.Linear(40, 10), nn.Linear(9 * 64, 10)
        self.bias, self.other = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))
        self.embedding, self.recurrent = nn.Embedding(30, 8), nn.LSTM(8, 20, batch_first=True)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def recurrent(net, x):
    return net.last(net.recurrent(net.embedding(x))[0][:, -1])


def two_biases(net, x):
    return net.last(net.first(x.flatten(1)).tanh()) + (net.bias + net.other)


def same_part_twice(net, x):
    hidden = net.first(x.flatten(1)).tanh()
    return net.halves(torch.cat([hidden, hidden], 1))


def joined_images(net, x):
    hidden = torch.cat([x, net.convolution(x).relu()], 1)
    return net.images(torch.cat([hidden, net.second(hidden)], 1).flatten(1))


def input_in_place(net, x):
    x = x.flatten(1)
    x.sub_(0.5).mul_(2)
    return net.last(net.first(x))


def whole_in_place(net, x):
    hidden = net.first(x.flatten(1)).tanh()
    whole = torch.cat([hidden, hidden * 2], 1)
    whole.mul_(0.5)
    return net.halves(whole) + hidden[:, :10]


def turned_input(net, x):
    hidden = x[:, 0] * 2
    hidden.transpose_(1, 2)
    return net.last(net.first(hidden.flatten(1)))


def grown_from_nothing(net, x):
    grown = torch.empty(0)
    for _ in range(2):
        grown = torch.cat([grown, net.first(x.flatten(1)).tanh()], 1)
    return net.halves(grown)


FORWARDS = [
    recurrent, two_biases, same_part_twice, joined_images, input_in_place, whole_in_place, turned_input,
    grown_from_nothing,
]  # fmt: skip


@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.parametrize("forward", FORWARDS)
def test_the_gradient_of_a_recorded_model_is_that_of_the_model(forward, clients):
    field = Field("x", "int64", (6,), high=30) if forward is recurrent else Field("x", "float32", (1, 8, 8))
    label = Field("y", "int64", high=10)
    model = Model(ModelSpec("own", lambda: Layers(forward), cross_entropy, (field,), label, {"accuracy": accuracy}))
    programs, calls, mask = Programs(CPU), [], torch.ones(clients, 5)

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        shape = (clients, 5, *field.shape)
        x = torch.randint(30, shape, generator=generator) if field.high else torch.randn(shape, generator=generator)
        params = torch.from_numpy(model.initial) + 0.1 * torch.randn(clients, model.initial.size, generator=generator)
        return [x, torch.randint(10, (clients, 5), generator=generator), params]

    def step(x, y, params):
        calls.append(1)
        oracle = CohortOracle(model, {"x": x, "y": y}, mask)
        loss, gradient, _ = oracle(params)
        return {"params": params - 0.1 * gradient, "gradient": gradient, "loss": loss, METRICS: oracle.sums_KM}

    held = drawn(0)
    for seed in (1, 2):
        for memory, values in zip(held, drawn(seed), strict=True):
            memory.copy_(values)
        found = programs.run("key", lambda: step(*held), held, {"params": held[2]}) | {"params": held[2]}
        torch.testing.assert_close(found, step(*drawn(seed)))
    assert len(calls) == 1 + 2  # the program passed its trial


def trained(model, **computing):
    """What two rounds of three clients, whose last batches are short, make of a model, and their shards."""
    shards = [draw_examples(model.spec, count, np.random.default_rng(count)) for count in (3, 9, 6)]
    population, algorithm = Population.of(["a", "b", "c"], shards, 5), create("fedavg", {"batch_size": 4})
    engine = Engine(model, algorithm, population, seed=7, computing=Computing(**computing))
    for number in (1, 2):
        engine.run_round(number, range(3))
    return engine.state["params"], shards


@pytest.mark.parametrize(
    "spec",
    [
        test_promises.OPERATED,
        test_promises.PROMISES["losses"]["cross-entropy over pixels"][0],
        test_promises.PROMISES["losses"]["Gaussian likelihood"][0],
    ],
    ids=["operators", "pixels", "Gaussian"],
)
def test_what_can_be_exported_trains_in_the_engine_as_in_torch(spec):
    model, algorithm = Model(spec), create("fedavg", {"batch_size": 4})
    for at_once in (1, 3):
        found, shards = trained(model, at_once=at_once)
        state = {"params": model.initial}
        for number in (1, 2):
            state = reference_round(model, algorithm, state, shards, number, 7)
        moved = np.linalg.norm(state["params"] - model.initial)
        assert np.linalg.norm(found - state["params"]) < 1e-5 * moved


def test_the_engine_drops_the_channels_that_devices_drop():
    model = Model(test_promises.DROPPED_WHOLE)
    graphs = export_graphs(model, create("fedavg", {"batch_size": 4}))
    expected, _ = trained(model, graphs=graphs)
    for at_once in (1, 3):
        found, _ = trained(model, at_once=at_once)
        assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected - model.initial)
