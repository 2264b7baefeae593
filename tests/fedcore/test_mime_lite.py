"""MimeLite with each of its base optimizers."""

import numpy as np
import pytest

from fedcore.algorithms.mime_lite import MimeLite
from fedcore.batching import StreamKey
from tests.fedcore.quadratics import run_device, run_round
from tests.fedcore.references import COHORTS, SEED, D, check, mean_over, ordered_batches, problems, start
from tests.fedcore.variants import MIMES

PROBLEMS = problems()
CLIENTS = PROBLEMS[0].clients
BATCH = 4


def mimelite(algorithm, problem, x):
    b1, b2, kind = algorithm.beta1, algorithm.beta2, algorithm.optimizer
    m, v = np.zeros(D), np.full(D, algorithm.initial_v)
    for number in range(len(COHORTS)):

        def direction(g, m=m, v=v):
            u = g if kind == "adagrad" else b1 * m + (1 - b1) * g
            return u if kind == "momentum" else u / (np.sqrt(v) + algorithm.epsilon)

        def delta(slot, examples, x=x, number=number, direction=direction):
            y = x
            for batch in ordered_batches(examples, slot, number, algorithm.batch_size, algorithm.epochs):
                y = y - algorithm.client_lr * direction(problem.gradient(y, batch))
            return y - x

        c = mean_over(algorithm, problem, number, lambda slot, examples, x=x: problem.gradient(x, examples))
        x = x + algorithm.server_lr * mean_over(algorithm, problem, number, delta)
        m = b1 * m + (1 - b1) * c
        v = v + c * c if kind == "adagrad" else b2 * v + (1 - b2) * c * c
    return {"params": x} | {"momentum": {"m": m}, "adam": {"m": m, "v": v}, "adagrad": {"v": v}}[kind]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("algorithm", MIMES, ids=repr)
def test_five_rounds_agree_with_the_paper(algorithm, problem):
    check(algorithm, problem, mimelite)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adagrad"])
def test_the_optimizer_moves_by_gradients_at_the_old_model(optimizer):
    states = []
    for epochs, client_lr in ((1, 0.01), (7, 0.2)):
        algorithm = MimeLite(optimizer=optimizer, client_lr=client_lr, epochs=epochs, batch_size=BATCH)
        states.append(run_round(algorithm, algorithm.init(start()), CLIENTS, SEED))
    gradient = np.mean([start() - a.mean(0) for a in CLIENTS], 0)
    for state in states:
        if optimizer != "adagrad":
            np.testing.assert_allclose(state["m"], 0.1 * gradient, rtol=1e-12)
        if optimizer == "adam":
            np.testing.assert_allclose(state["v"], 0.99 * 1e-4 + 0.01 * gradient**2, rtol=1e-12)
        if optimizer == "adagrad":
            np.testing.assert_allclose(state["v"], 1e-4 + gradient**2, rtol=1e-12)
    assert np.abs(states[0]["params"] - states[1]["params"]).max() > 0.01


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad"])
def test_devices_hold_the_optimizers_state_fixed(optimizer):
    algorithm = MimeLite(optimizer=optimizer, client_lr=0.5, epochs=3, batch_size=2, epsilon=0.5)
    broadcast = {"params": start()} | {"momentum": {"m": np.full(D, 2.0)}, "adagrad": {"v": np.full(D, 4.0)}}[optimizer]
    report = run_device(algorithm, broadcast, np.repeat(start()[None] + 1, 2, 0), StreamKey(SEED, 0, 0))
    y = start()
    for _ in range(3):
        g = y - start() - 1
        y = y - 0.5 * (0.9 * 2.0 + 0.1 * g if optimizer == "momentum" else g / 2.5)
    np.testing.assert_allclose(report["delta"], y - start(), rtol=1e-12)
    np.testing.assert_allclose(report["gradient"], -1, rtol=1e-15)


def test_the_full_batch_gradient_weighs_a_short_batch_by_its_size():
    algorithm = MimeLite(batch_size=BATCH)
    examples = CLIENTS[2]  # nine examples in batches of four: the last batch holds one
    report = run_device(algorithm, algorithm.broadcast(algorithm.init(start())), examples, StreamKey(SEED, 0, 0))
    np.testing.assert_allclose(report["gradient"], start() - examples.mean(0), rtol=1e-12)
    of_batches = np.mean([start() - examples[at : at + BATCH].mean(0) for at in (0, 4, 8)], 0)
    assert np.abs(report["gradient"] - of_batches).max() > 1e-3
