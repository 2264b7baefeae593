"""Clients of one step report together what each would report, and where that cannot be, they are trained as others."""

import numpy as np
import pytest
import torch

from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import trips_of
from fedcore.algorithms.fed_avg import FedAvg
from simulator.engine import Engine
from simulator.engines.oracle import CohortOracle, NotAffine, one_step
from tests.fedcore.variants import VARIANTS
from tests.simulator.reference import reference_round
from tests.simulator.test_engine import uneven

COUNT_K1, WEIGHT_K = torch.tensor([[2.0], [3.0], [5.0]]), torch.tensor([2.0, 3.0, 5.0])


def test_an_affine_report_gives_the_sum_of_the_reports_of_clients():
    torch.manual_seed(0)
    centres_KD, affine = torch.randn(3, 4), set()

    def grad(params_D):
        gradient_KD = params_D - centres_KD
        return gradient_KD.sum(-1, keepdim=True), gradient_KD, COUNT_K1

    for algorithm in VARIANTS:
        (trip,) = trips_of(algorithm)
        received = trip.broadcast(algorithm.init(torch.randn(4)))
        try:
            found = one_step(trip, received, COUNT_K1)
            gradient_D = found.gradient_weights(WEIGHT_K) @ grad(found.point)[1]
        except (NotAffine, ValueError):
            continue
        affine.add(algorithm.name)
        carry = trip.passes[0].step(trip.passes[0].begin(received), received, grad)
        expected = trip.report(received, {trip.passes[0].name: carry})
        sums = found.sums(gradient_D, WEIGHT_K)
        assert sums.keys() == expected.keys()
        for name, one in expected.items():
            torch.testing.assert_close(sums[name], WEIGHT_K @ one.expand(3, -1), atol=1e-5, rtol=1e-5)
    assert {"fedavg", "fedsgd", "fedprox", "fednova", "fedbuff", "fedadam", "fedyogi", "fedlamb"} <= affine


@pytest.mark.parametrize(
    "how",
    [abs, lambda v: v * v, lambda v: v**2, lambda v: 1 / v, lambda v: v == 0, lambda v: v or 0.0, lambda v: None],
)
def test_a_report_that_is_not_affine_is_found_out(how):
    class Odd(FedAvg):
        def report(self, broadcast, carries):
            return {"delta": how(carries["train"]["params"] - broadcast["params"])}

    with pytest.raises(NotAffine):
        one_step(Odd(), {"params": torch.ones(4)}, COUNT_K1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fedavg", {"client_optimizer": "momentum", "weighting": "uniform"}), ("fedprox", {}), ("fedsgd", {})],
)
def test_one_gradient_trains_clients_of_one_step_as_the_reference_does(name, settings, monkeypatch):
    monkeypatch.setattr(CohortOracle, "__call__", None)  # the gradient of each client
    population, model = uneven(), Model(load("digits_cnn"))
    algorithm = create(name, {"batch_size": 17, **settings})
    engine = Engine(model, algorithm, population, seed=7)
    state = engine.state
    for number, cohort in enumerate([[0, 1, 2, 3], [2, 0, 1]], start=1):
        engine.run_round(number, cohort)
        state = reference_round(model, algorithm, state, [population.shard(c) for c in cohort], number, 7)
        for key, vector in state.items():
            np.testing.assert_allclose(engine.state[key], vector, atol=1e-6)
