"""FedPA: posterior samples of the devices, against dense covariance matrices."""

import dataclasses

import numpy as np
import pytest

from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.fed_pa import FedPA
from fedcore.batching import StreamKey
from tests.fedcore.quadratics import run_device
from tests.fedcore.references import SEED, D, check, mean_over, ordered_batches, problems, server_momentum, start
from tests.fedcore.variants import POSTERIOR

PROBLEMS = problems()
EXAMPLES = PROBLEMS[1].clients[2]


def iterates(algorithm, problem, x, examples, slot, number):
    steps = algorithm.burn_in_steps + algorithm.samples * algorithm.steps_per_sample
    y, models = x, []
    for batch in ordered_batches(examples, slot, number, algorithm.batch_size, steps, steps):
        y = y - algorithm.client_lr * problem.gradient(y, batch)
        models.append(y)
    assert len(models) == steps
    return models


def fedpa(algorithm, problem, x):
    def delta(slot, examples, x, number):
        models = iterates(algorithm, problem, x, examples, slot, number)
        if number < algorithm.burn_in_rounds:
            return models[-1] - x
        kept = np.array(models[algorithm.burn_in_steps :])
        samples = kept.reshape(algorithm.samples, algorithm.steps_per_sample, D).mean(1)
        r = 1 / (1 + (len(samples) - 1) * algorithm.rho)
        spread = np.cov(samples.T) if len(samples) > 1 else np.zeros((D, D))
        return np.linalg.solve(r * np.eye(D) + (1 - r) * spread, samples.mean(0) - x)

    def direction(x, number):
        return mean_over(algorithm, problem, number, lambda slot, examples: delta(slot, examples, x, number))

    rounds = {"round": 5} if algorithm.burn_in_rounds else {}
    return server_momentum(algorithm, x, direction) | rounds


def reported(algorithm, problem=PROBLEMS[1], examples=EXAMPLES):
    key = StreamKey(SEED, 0, 0)
    return run_device(algorithm, algorithm.broadcast(algorithm.init(start())), examples, key, problem.oracle)["delta"]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("algorithm", POSTERIOR, ids=repr)
def test_five_rounds_agree_with_dense_matrices(algorithm, problem):
    check(algorithm, problem, fedpa)


@pytest.mark.parametrize("changes", [{"rho": 0.0}, {"samples": 1}])
def test_without_covariance_the_delta_leads_to_the_mean_of_the_samples(changes):
    algorithm = dataclasses.replace(POSTERIOR[0], **changes)
    models = iterates(algorithm, PROBLEMS[1], start(), EXAMPLES, 0, 0)[algorithm.burn_in_steps :]
    np.testing.assert_allclose(reported(algorithm), np.mean(models, 0) - start(), rtol=1e-12)


def test_the_covariance_is_the_unbiased_one():
    algorithm = FedPA(client_lr=0.1, batch_size=4, samples=2, steps_per_sample=1, burn_in_steps=0, rho=1.0)
    first, second = iterates(algorithm, PROBLEMS[1], start(), EXAMPLES, 0, 0)
    spread = np.outer(second - first, second - first) / 2
    expected = np.linalg.solve(0.5 * np.eye(D) + 0.5 * spread, (first + second) / 2 - start())
    np.testing.assert_allclose(reported(algorithm), expected, rtol=1e-12)


def test_a_round_of_burn_in_is_one_of_fedavg():
    algorithm = FedPA(client_lr=0.1, batch_size=9, samples=2, steps_per_sample=3, burn_in_steps=1, burn_in_rounds=1)
    averaging = FedAvg(client_lr=0.1, batch_size=9, epochs=7)
    np.testing.assert_allclose(reported(algorithm), reported(averaging), rtol=1e-12)


def test_a_sample_is_the_mean_of_an_epoch_when_its_steps_are_one():
    algorithm = FedPA(client_lr=0.1, batch_size=3, samples=1, steps_per_sample=3, burn_in_steps=3)
    last_epoch = iterates(algorithm, PROBLEMS[1], start(), EXAMPLES, 0, 0)[3:]
    np.testing.assert_allclose(reported(algorithm), np.mean(last_epoch, 0) - start(), rtol=1e-12)
