"""Local AdaAlter against a second writing of its equations, in NumPy float64, on quadratics."""

import numpy as np
import pytest

from fedcore.algorithms.local_ada_alter import LocalAdaAlter
from fedcore.batching import StreamKey, permutation
from tests.fedcore.quadratics import run_cohort, run_device, run_round

D, BATCH, EPOCHS, SEED = 5, 4, 2, 11


@pytest.fixture
def clients():
    rng = np.random.default_rng(5)
    return [rng.normal(3 * k, 1, (n, D)) for k, n in enumerate((6, 4, 9, 1))]


def reference(algorithm, x, clients, cohorts):
    b2 = np.full(D, algorithm.initial_b * algorithm.initial_b)
    for number, cohort in enumerate(cohorts):
        models, accumulators, weights = [], [], []
        for slot, k in enumerate(cohort):
            y, a2, t = x.copy(), b2.copy(), 0
            for epoch in range(EPOCHS):
                order = permutation(StreamKey(SEED, number, slot), 0, epoch, len(clients[k]))
                for start in range(0, len(clients[k]), BATCH):
                    t += 1
                    g = y - clients[k][order[start : start + BATCH]].mean(0)
                    y = y - algorithm.client_lr * g / np.sqrt(b2 + t * algorithm.epsilon * algorithm.epsilon)
                    a2 = a2 + g * g
            models.append(y)
            accumulators.append(a2)
            weights.append(len(clients[k]) if algorithm.weighting == "examples" else 1)
        x, b2 = np.average(models, 0, weights), np.average(accumulators, 0, weights)
    return {"params": x, "b2": b2}


@pytest.mark.parametrize(
    "algorithm",
    [
        LocalAdaAlter(batch_size=BATCH, epochs=EPOCHS),
        LocalAdaAlter(0.9, epsilon=0.3, initial_b=2.0, batch_size=BATCH, epochs=EPOCHS, weighting="examples"),
    ],
    ids=repr,
)
def test_rounds_of_partial_cohorts_agree_with_the_equations(algorithm, clients):
    x, cohorts = np.linspace(-1, 1, D), [[0, 1, 2, 3], [3, 1], [2, 0, 1], [2]]
    state = algorithm.init(x)
    for number, cohort in enumerate(cohorts):
        state = run_round(algorithm, state, [clients[k] for k in cohort], SEED, number)
    for name, value in reference(algorithm, x, clients, cohorts).items():
        np.testing.assert_allclose(state[name], value, rtol=1e-12, err_msg=name)


def test_the_denominator_stays_that_of_the_start_but_for_epsilon(clients):
    algorithm = LocalAdaAlter(client_lr=0.5, epsilon=2.0, batch_size=64, epochs=3)
    x, b2 = np.linspace(-1, 1, D), np.linspace(1, 3, D)
    report = run_device(algorithm, {"params": x, "b2": b2}, clients[0], StreamKey(SEED, 0, 0))
    y, gained = x, 0.0
    for t in (1, 2, 3):
        g = y - clients[0].mean(0)
        y, gained = y - 0.5 * g / np.sqrt(b2 + 4 * t), gained + g**2
    np.testing.assert_allclose(report["delta"], y - x, rtol=1e-12)
    np.testing.assert_allclose(report["squares"], gained, rtol=1e-12)


def test_a_cohort_at_once_is_a_loop_over_its_clients():
    algorithm = LocalAdaAlter(batch_size=BATCH, epochs=EPOCHS)
    examples_KND = np.random.default_rng(8).normal(size=(3, 7, D))
    broadcast = algorithm.broadcast(algorithm.init(np.linspace(-1, 1, D)))
    together = run_cohort(algorithm, broadcast, examples_KND, lambda k: StreamKey(SEED, 1, k))
    for k, examples in enumerate(examples_KND):
        for name, value in run_device(algorithm, broadcast, examples, StreamKey(SEED, 1, k)).items():
            np.testing.assert_allclose(together[name][k], value, rtol=1e-12, err_msg=name)
