"""Averaging: FedAvg with its client optimizers, FedSGD, FedProx, FedNova, normalised FedAvg, and FedBuff."""

import dataclasses

import numpy as np
import pytest

from fedcore.algorithms.algorithm import ServerStep
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.fed_avg_m import FedAvgM
from fedcore.algorithms.fed_buff import FedBuff
from fedcore.algorithms.fed_nova import FedNova
from fedcore.algorithms.fed_prox import FedProx
from fedcore.algorithms.fed_sgd import FedSGD
from fedcore.algorithms.norm_fed_avg import NormFedAvg
from fedcore.batching import StreamKey
from tests.fedcore.quadratics import run_device, run_passes, run_round
from tests.fedcore.references import (
    COHORTS,
    SEED,
    D,
    check,
    mean_delta,
    mean_over,
    ordered_batches,
    problems,
    server_momentum,
    start,
    trained,
)
from tests.fedcore.variants import AVERAGING, LOCAL

PROBLEMS = problems()
QUADRATICS, REGRESSION = PROBLEMS


def fedavg(algorithm, problem, x):
    for number in range(len(COHORTS)):
        x = x + algorithm.server_lr * mean_delta(algorithm, problem, x, number)
    return {"params": x}


def fedsgd(algorithm, problem, x):
    def down(x, number):
        return -mean_over(algorithm, problem, number, lambda slot, examples: problem.gradient(x, examples))

    return server_momentum(algorithm, x, down)


def fedprox(algorithm, problem, x):
    return server_momentum(algorithm, x, lambda x, number: mean_delta(algorithm, problem, x, number, algorithm.mu))


def fednova(algorithm, problem, x):
    rho, mu, lr = algorithm.client_momentum, algorithm.mu, algorithm.client_lr

    def normalised(slot, examples, x, number):
        y, u, batches = x, 0, ordered_batches(examples, slot, number, algorithm.batch_size, algorithm.epochs)
        for batch in batches:
            u = rho * u + problem.gradient(y, batch) + mu * (y - x)
            y = y - lr * u
        a = coefficients(rho, mu, lr, len(batches))
        return np.append((x - y) / (lr * a), a)

    def down(x, number):
        mean = mean_over(algorithm, problem, number, lambda slot, examples: normalised(slot, examples, x, number))
        return -lr * mean[-1] * mean[:-1]

    return server_momentum(algorithm, x, down)


def coefficients(rho, mu, lr, steps):
    """a of the paper in its closed forms; of both terms together, by the system's response to a gradient of 1."""
    if rho and mu:
        system = np.array([[1 - lr * mu, rho], [-lr * mu, rho]])  # of (a, c) from one step to the next
        return sum(np.linalg.matrix_power(system, k) @ [1.0, 1.0] for k in range(steps))[0]
    if mu:
        return (1 - (1 - lr * mu) ** steps) / (lr * mu)
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)


def normfedavg(algorithm, problem, x):
    for number in range(len(COHORTS)):
        delta = mean_delta(algorithm, problem, x, number)
        x = x + algorithm.server_lr * delta / np.linalg.norm(delta)
    return {"params": x}


REFERENCES = {
    "fedavg": fedavg,
    "fedsgd": fedsgd,
    "fedprox": fedprox,
    "fednova": fednova,
    "normfedavg": normfedavg,
    "fedbuff": fedavg,  # as long as every device starts from the newest model
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("algorithm", AVERAGING, ids=repr)
def test_five_rounds_agree_with_the_papers(algorithm, problem):
    check(algorithm, problem, REFERENCES[algorithm.name])


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_fedsgd_is_fedavg_of_one_full_batch_step(problem, weighting):
    sgd = FedSGD(server_lr=0.25, batch_size=4, weighting=weighting)
    averaging = FedAvg(client_lr=0.25, batch_size=64, weighting=weighting)
    np.testing.assert_allclose(trained(sgd, problem)["params"], trained(averaging, problem)["params"], rtol=1e-12)


def test_fedavg_of_one_full_batch_step_is_a_gradient_step_on_all():
    clients = QUADRATICS.clients
    state = run_round(FedAvg(client_lr=0.25, batch_size=64), {"params": start()}, clients)
    gradient = start() - np.concatenate(clients).mean(0)
    np.testing.assert_allclose(state["params"], start() - 0.25 * gradient, rtol=1e-12)


def test_fedavg_with_full_batches_contracts_to_the_closed_form():
    clients = QUADRATICS.clients
    state = run_round(FedAvg(client_lr=0.25, epochs=6, batch_size=64), {"params": start()}, clients)
    mean = np.concatenate(clients).mean(0)
    np.testing.assert_allclose(state["params"], mean + 0.75**6 * (start() - mean), rtol=1e-12)


def test_one_client_as_two_counts_twice_under_uniform_weights():
    algorithm, clients = FedAvg(client_lr=0.2, batch_size=64, weighting="uniform"), QUADRATICS.clients
    joined = run_round(algorithm, {"params": start()}, [np.concatenate([clients[0]] * 2), clients[1]])
    split = run_round(algorithm, {"params": start()}, [clients[0], clients[0], clients[1]])
    assert np.abs(joined["params"] - split["params"]).max() > 0.01


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_client_optimizer_starts_anew_every_round(optimizer):
    algorithm = FedAvg(**LOCAL, client_optimizer=optimizer)
    broadcast, examples = {"params": start()}, QUADRATICS.clients[0]
    first = run_device(algorithm, broadcast, examples, StreamKey(0, 0, 0))
    again = run_device(algorithm, broadcast, examples, StreamKey(0, 0, 0))
    np.testing.assert_array_equal(first["delta"], again["delta"])
    carry = algorithm.passes[0].begin(broadcast)
    np.testing.assert_array_equal(carry["m"], 0)


def test_adams_first_local_step_has_the_length_of_the_learning_rate():
    algorithm = FedAvg(client_lr=0.2, batch_size=64, client_optimizer="adam", client_epsilon=1e-12)
    report = run_device(algorithm, {"params": start()}, QUADRATICS.clients[0], StreamKey(0, 0, 0))
    np.testing.assert_allclose(np.abs(report["delta"]), 0.2, rtol=1e-9)


def test_client_adam_in_float32_keeps_the_digits_of_its_corrections():
    """Against torch's own in float64, whose every step starts at 0, with gradients that float32 holds exactly."""
    torch = pytest.importorskip("torch")
    algorithm = FedAvg(client_lr=0.01, client_optimizer="adam")
    x, (stage,) = torch.zeros(D, dtype=torch.float64, requires_grad=True), algorithm.passes
    adam = torch.optim.Adam([x], lr=0.01, eps=algorithm.client_epsilon)
    received = {"params": np.zeros(D, np.float32)}
    carry, distances = stage.begin(received), []
    for size in [1, 2, 0.5, 4, -0.25, 1, 8, 1] * 40:
        gradient = np.array([1.0, -0.5, 0.25, 3.0, -2.0]) * size
        carry = stage.step(carry | received, received, lambda y, g=gradient: (0, np.float32(g), 1))
        assert {value.dtype for value in carry.values()} == {np.dtype(np.float32)}
        x.grad, x.data = torch.tensor(gradient), torch.zeros_like(x)
        adam.step()
        distances.append(np.abs(carry["params"] / x.detach().numpy() - 1).max())
    assert max(distances) < 2e-6


def test_fedprox_without_its_term_is_fedavg_of_the_same_weighting():
    for weighting in ("examples", "uniform"):
        ours = trained(FedProx(**LOCAL, mu=0.0, weighting=weighting), REGRESSION)
        np.testing.assert_array_equal(
            ours["params"], trained(FedAvg(**LOCAL, weighting=weighting), REGRESSION)["params"]
        )
    ours, theirs = (trained(one, REGRESSION)["params"] for one in (FedProx(**LOCAL, mu=0.0), FedAvg(**LOCAL)))
    assert np.abs(ours - theirs).max() > 1e-3  # their defaults differ


def test_one_step_of_fedprox_is_one_of_fedavg_whatever_mu():
    averaging = FedAvg(client_lr=0.2, batch_size=64, weighting="uniform")
    for mu in (0.0, 5.0):
        proximal = FedProx(client_lr=0.2, batch_size=64, mu=mu)
        ours, theirs = (run_round(one, {"params": start()}, QUADRATICS.clients) for one in (proximal, averaging))
        np.testing.assert_allclose(ours["params"], theirs["params"], rtol=1e-14)


def test_fedprox_stays_nearer_the_greater_mu_is():
    settings = {"client_lr": 0.05, "batch_size": 64, "epochs": 20}
    moved = [
        np.linalg.norm(
            run_round(FedProx(**settings, mu=mu), {"params": start()}, QUADRATICS.clients)["params"] - start()
        )
        for mu in (0.0, 1.0, 10.0)
    ]
    assert moved[0] > 1.3 * moved[1] > 4 * moved[2]


def test_server_momentum_of_fedprox_is_that_of_fedavgm():
    ours = trained(FedProx(**LOCAL, mu=0.0, server_momentum=0.9, weighting="examples"), REGRESSION)
    theirs = trained(FedAvgM(**LOCAL, momentum=0.9), REGRESSION)
    np.testing.assert_allclose(ours["params"], theirs["params"], rtol=1e-13)


@pytest.mark.parametrize("changes", [{}, {"client_momentum": 0.7}, {"mu": 0.4}])
def test_fednova_with_equal_steps_is_fedavg(changes):
    clients = [np.random.default_rng(k).normal(k, 1, (6, D)) for k in range(3)]
    nova = FedNova(client_lr=0.1, epochs=3, batch_size=4, **changes)
    momentum = {"client_optimizer": "momentum", "client_beta1": 0.7} if "client_momentum" in changes else {}
    averaging = FedProx(client_lr=0.1, epochs=3, batch_size=4, mu=changes.get("mu", 0.0), **momentum)
    ours = run_round(nova, nova.init(start()), clients, 3)
    theirs = run_round(dataclasses.replace(averaging, weighting="examples"), {"params": start()}, clients, 3)
    np.testing.assert_allclose(ours["params"], theirs["params"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("mu", "alike"), [(0.5, True), (9.0, True), (15.0, False), (20.0, False)])
def test_fednovas_a_is_the_papers_while_proximal_steps_do_not_overshoot(mu, alike):
    """‖a_i‖₁ of its section 4.1, a_i = (1, 1 − ημ, …); the code of the paper multiplies by the steps instead."""
    algorithm = FedNova(client_lr=0.1, mu=mu, epochs=4, batch_size=64)
    examples, (stage,) = QUADRATICS.clients[0], algorithm.passes
    last = run_passes(algorithm, {"params": start()}, examples, StreamKey(0, 0, 0))[stage.name]
    a_i = (1 - 0.1 * mu) ** np.arange(4.0)
    np.testing.assert_allclose(last["a"], a_i.sum(), rtol=1e-12, atol=1e-12)
    assert (abs(last["a"][0] - np.abs(a_i).sum()) < 1e-9) == alike
    assert last["a"] < 4


def test_fednova_counts_the_steps_that_were_taken():
    algorithm = FedNova(client_lr=0.1, epochs=2, batch_size=4)
    taken = [
        run_device(algorithm, {"params": start()}, examples, StreamKey(0, 0, 0))["a"][0]
        for examples in QUADRATICS.clients
    ]
    assert taken == [4, 2, 6, 2]


def test_fednova_reaches_an_optimum_that_fedavg_misses():
    """Devices with more steps pull FedAvg to their own optimum."""
    few, many = np.full((4, D), 1.0), np.full((40, D), -1.0)
    settings = {"client_lr": 0.01, "batch_size": 4, "weighting": "uniform"}
    ends = {}
    for algorithm in (FedAvg(**settings), FedNova(**settings)):
        state = algorithm.init(start())
        for number in range(300):
            state = run_round(algorithm, state, [few, many], 0, number)
        ends[algorithm.name] = np.abs(state["params"]).max()
    assert ends["fednova"] < 0.03
    assert ends["fedavg"] > 0.5


def test_a_normalised_step_has_the_length_of_the_learning_rate():
    state = run_round(NormFedAvg(server_lr=0.7), {"params": start()}, QUADRATICS.clients)
    assert np.linalg.norm(state["params"] - start()) == pytest.approx(0.7, rel=1e-12)


def test_normalised_fedavg_takes_no_step_along_a_mean_of_zero():
    state = NormFedAvg().update({"params": start()}, {"delta": np.zeros(D)})
    np.testing.assert_array_equal(state["params"], start())


ARRIVALS = ((0, 0), (1, 0), (2, 1), (0, 0), (3, 1), (1, 0), (2, 3), (0, 1), (3, 4), (1, 2))
"""Reports in their order: of which client, and how many versions the model that it started from was old."""


def fedbuff_arrival_by_arrival(algorithm, problem, x, goal):
    """Algorithm 1 of Nguyen et al. as one loop over arrivals, with the staleness weights of the paper."""
    models, total, held = [x], np.zeros_like(x), 0
    for place, (client, staleness) in enumerate(ARRIVALS):
        base = max(0, len(models) - 1 - staleness)
        y = models[base]
        batches = ordered_batches(problem.clients[client], place, base, algorithm.batch_size, algorithm.epochs)
        for batch in batches:
            y = y - algorithm.client_lr * problem.gradient(y, batch)
        total = total + (y - models[base]) / np.sqrt(1 + len(models) - 1 - base)
        held += 1
        if held == goal:
            models.append(models[-1] + algorithm.server_lr / goal * total)
            total, held = np.zeros_like(x), 0
    return models[1:]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("goal", [1, 2, 5])
def test_fedbuff_is_the_papers_loop_over_arrivals(problem, goal):
    algorithm = FedBuff(**LOCAL, server_lr=0.6)
    states = [algorithm.init(start())]
    for first in range(0, len(ARRIVALS), goal):
        reports, weights = [], []
        for place, (client, staleness) in enumerate(ARRIVALS[first : first + goal], first):
            base = max(0, len(states) - 1 - staleness)
            key = StreamKey(SEED, base, place)
            reports.append(run_device(algorithm, states[base], problem.clients[client], key, problem.oracle)["delta"])
            weights.append((1 + len(states) - 1 - base) ** -0.5)
        mean = {"delta": sum(c * delta for c, delta in zip(weights, reports, strict=True)) / sum(weights)}
        step = ServerStep(devices=goal, discount=sum(weights) / goal)
        states.append(algorithm.update(states[-1], mean, step))
    expected = fedbuff_arrival_by_arrival(algorithm, problem, start(), goal)
    assert np.abs(expected[-1] - start()).max() > 0.01
    np.testing.assert_allclose([state["params"] for state in states[1:]], expected, rtol=1e-12, atol=1e-13)


def test_a_buffer_of_old_deltas_moves_fedbuff_less():
    """Equally old deltas have the mean of fresh ones: only the discount tells them apart."""
    mean = {"delta": np.ones(D)}
    fresh, old = (FedBuff().update({"params": start()}, mean, ServerStep(discount=c)) for c in (1.0, 0.25))
    np.testing.assert_allclose(old["params"] - start(), 0.25 * (fresh["params"] - start()), rtol=1e-12)
