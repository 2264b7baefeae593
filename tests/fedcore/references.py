"""The algorithms written a second time, from the papers: one client after the other, one local step after the other.

They share no code with `fedcore.algorithms`. A reference trains rounds over cohorts and gives the server state.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcore.batching import StreamKey, permutation
from tests.fedcore.quadratics import gradient_oracle, regression_oracle, run_round

D, SEED = 5, 11
LAYERS = (slice(0, 2), slice(2, 5))
COHORTS = ((0, 1, 2, 3), (2, 0), (3, 1, 2), (1,), (0, 3, 2))
SIZES = (6, 4, 9, 1)


@dataclass(frozen=True)
class Problem:
    """A loss with its clients: `gradient(y, examples)` is the mean over the examples, as the references take it."""

    name: str
    gradient: Any
    oracle: Any
    clients: list


def problems():
    """Quadratics and a ragged linear regression, both with clients that disagree."""
    random = np.random.default_rng(5)
    quadratic = [random.normal(3 * k, 1, (n, D)) for k, n in enumerate(SIZES)]
    regression = [random.normal(0.3 * k, 0.7, (n, D + 1)) for k, n in enumerate(SIZES)]
    return [
        Problem("quadratics", lambda y, a: y - a.mean(0), gradient_oracle, quadratic),
        Problem("regression", _regression_gradient, regression_oracle, regression),
    ]


def _regression_gradient(y, examples):
    total = np.zeros(D)
    for *a, t in examples:
        total += (np.dot(a, y) - t) * np.array(a)
    return total / len(examples)


def start():
    """The model of round 0."""
    return np.linspace(-1, 1, D)


def trained(algorithm, problem):
    """The state that the algorithm itself reaches."""
    state = algorithm.init(start())
    for number, cohort in enumerate(COHORTS):
        members = [problem.clients[k] for k in cohort]
        state = run_round(algorithm, state, members, SEED, number, oracle=problem.oracle, layers=LAYERS)
    return state


def check(algorithm, problem, reference):
    """Compare the algorithm's rounds with those of the reference, vector for vector."""
    state, expected = trained(algorithm, problem), reference(algorithm, problem, start())
    assert set(state) == set(expected)
    assert np.abs(state["params"] - start()).max() > 0.01
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, rtol=1e-12, atol=1e-13, err_msg=name)


def ordered_batches(examples, slot, number, batch_size, epochs, steps=None):
    """The batches of the pass 0 of a device."""
    made = []
    for epoch in range(epochs):
        order = permutation(StreamKey(SEED, number, slot), 0, epoch, len(examples))
        made += [examples[order[at : at + batch_size]] for at in range(0, len(examples), batch_size)]
    return made[:steps]


def weights(algorithm, members):
    """p_k of the members of a cohort."""
    counts = [len(a) if algorithm.weighting == "examples" else 1 for a in members]
    return [count / sum(counts) for count in counts]


def mean_over(algorithm, problem, number, of_client):
    """The mean of `of_client(slot, examples)` over the round's cohort."""
    members = [problem.clients[k] for k in COHORTS[number]]
    parts = [of_client(slot, examples) for slot, examples in enumerate(members)]
    return sum(p * part for p, part in zip(weights(algorithm, members), parts, strict=True))


def mean_delta(algorithm, problem, x, number, mu=0.0):
    """The mean over the cohort of y − x after local training with the algorithm's client optimizer."""

    def delta(slot, examples):
        y, optimizer = x, _client_optimizer(algorithm)
        for batch in ordered_batches(examples, slot, number, algorithm.batch_size, algorithm.epochs):
            y = y - algorithm.client_lr * optimizer(problem.gradient(y, batch) + mu * (y - x))
        return y - x

    return mean_over(algorithm, problem, number, delta)


def _client_optimizer(algorithm):
    """A function from the gradients of a device, one after the other, to the directions of its steps."""
    seen = []
    b1, b2, epsilon = algorithm.client_beta1, algorithm.client_beta2, algorithm.client_epsilon

    def direction(g):
        seen.append(g)
        t = len(seen)
        if algorithm.client_optimizer == "sgd":
            return g
        if algorithm.client_optimizer == "momentum":
            return sum(b1 ** (t - 1 - s) * seen[s] for s in range(t))
        m = sum((1 - b1) * b1 ** (t - 1 - s) * seen[s] for s in range(t)) / (1 - b1**t)
        v = sum((1 - b2) * b2 ** (t - 1 - s) * seen[s] ** 2 for s in range(t)) / (1 - b2**t)
        return m / (np.sqrt(v) + epsilon)

    return direction


def server_momentum(algorithm, x, directions):
    """The state after steps along `directions(x, number)` with the algorithm's `server_momentum`."""
    v = np.zeros_like(x)
    for number in range(len(COHORTS)):
        v = algorithm.server_momentum * v + directions(x, number)
        x = x + algorithm.server_lr * v
    return {"params": x} | ({"v": v} if algorithm.server_momentum else {})
