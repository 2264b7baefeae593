"""Server optimizers: FedAvgM, FedAdagrad, FedYogi, FedAdam in its published forms, FedLARS and FedLamb."""

import numpy as np
import pytest

from fedcore.algorithms.algorithm import ServerStep
from fedcore.algorithms.fed_adagrad import FedAdagrad
from fedcore.algorithms.fed_adam import FedAdam
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.fed_avg_m import FedAvgM
from fedcore.algorithms.fed_lamb import FedLamb
from fedcore.algorithms.fed_lars import FedLARS
from fedcore.algorithms.fed_yogi import FedYogi
from tests.fedcore.references import COHORTS, LAYERS, D, check, mean_delta, problems, start, trained
from tests.fedcore.variants import LOCAL, SERVER_OPTIMIZERS

PROBLEMS = problems()
DELTAS = [np.array([1.0, -0.5, 0.25, 0.0, -2.0]) * size for size in (1.0, -0.5, 0.1)]


def fedavgm(algorithm, problem, x):
    v = np.zeros(D)
    for number in range(len(COHORTS)):
        delta = mean_delta(algorithm, problem, x, number)
        v = algorithm.momentum * v + delta
        x = x + algorithm.server_lr * (delta + algorithm.momentum * v if algorithm.nesterov else v)
    return {"params": x, "v": v}


def adaptive(algorithm, problem, x):
    """FedAdagrad and FedYogi."""
    m, v = np.zeros(D), np.full(D, algorithm.tau**2 if algorithm.form == "paper" else 0.0)
    for number in range(len(COHORTS)):
        delta = mean_delta(algorithm, problem, x, number)
        m = algorithm.beta1 * m + (1 - algorithm.beta1) * delta
        if algorithm.name == "fedadagrad":
            v = v + delta * delta
        else:
            v = v - (1 - algorithm.beta2) * delta * delta * np.sign(v - delta * delta)
        x = x + algorithm.server_lr * m / (np.sqrt(v) + algorithm.tau)
    return {"params": x, "v": v} | ({"m": m} if algorithm.beta1 else {})


def fedadam(algorithm, problem, x):
    b1, b2 = algorithm.beta1, algorithm.beta2
    m, v = np.zeros(D), np.full(D, algorithm.tau**2 if algorithm.form == "paper" else 0.0)
    for t in range(1, len(COHORTS) + 1):
        delta = mean_delta(algorithm, problem, x, t - 1)
        m, v = b1 * m + (1 - b1) * delta, b2 * v + (1 - b2) * delta * delta
        if algorithm.form == "keras":
            step = np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + algorithm.tau)
        elif algorithm.form == "torch":
            step = m / (1 - b1**t) / (np.sqrt(v) / np.sqrt(1 - b2**t) + algorithm.tau)
        else:
            step = m / (np.sqrt(v) + algorithm.tau)
        x = x + algorithm.server_lr * step
    return {"params": x, "m": m, "v": v} | ({"round": t} if algorithm.form in {"keras", "torch"} else {})


def layerwise(algorithm, problem, x):
    """FedLARS and FedLamb."""
    m, v = np.zeros(D), np.zeros(D)
    for t in range(1, len(COHORTS) + 1):
        g = -mean_delta(algorithm, problem, x, t - 1)
        if algorithm.name == "fedlars":
            m = algorithm.momentum * m + (1 - algorithm.momentum) * (g + algorithm.weight_decay * x)
            u, epsilon = m, algorithm.epsilon
        else:
            b1, b2 = algorithm.beta1, algorithm.beta2
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            u = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + algorithm.epsilon) + algorithm.weight_decay * x
            epsilon = 0
        moved = x.copy()
        for layer in LAYERS:
            ratio = np.linalg.norm(x[layer]) / (np.linalg.norm(u[layer]) + epsilon)
            moved[layer] -= algorithm.server_lr * ratio * u[layer]
        x = moved
    return {"params": x, "m": m} | ({"v": v, "round": t} if algorithm.name == "fedlamb" else {})


REFERENCES = {
    "fedavgm": fedavgm,
    "fedadagrad": adaptive,
    "fedyogi": adaptive,
    "fedadam": fedadam,
    "fedlars": layerwise,
    "fedlamb": layerwise,
}


def after(algorithm, deltas=DELTAS, layers=LAYERS):
    """The states after updates by these mean deltas."""
    states = [algorithm.init(start())]
    for delta in deltas:
        states.append(algorithm.update(states[-1], {"delta": delta}, ServerStep(layers=layers)))
    return states


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("algorithm", SERVER_OPTIMIZERS, ids=repr)
def test_five_rounds_agree_with_the_papers(algorithm, problem):
    check(algorithm, problem, REFERENCES[algorithm.name])


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_without_momentum_is_fedavg(nesterov):
    ours = trained(FedAvgM(**LOCAL, momentum=0.0, nesterov=nesterov), PROBLEMS[1])
    np.testing.assert_array_equal(ours["params"], trained(FedAvg(**LOCAL), PROBLEMS[1])["params"])


def test_momentum_is_not_damped():
    state = after(FedAvgM(momentum=0.9), [np.ones(D)] * 200)[-1]
    np.testing.assert_allclose(state["v"], 10, rtol=1e-6)


def test_the_published_forms_of_adam_are_four_algorithms():
    ends = [after(FedAdam(form=form, tau=0.1))[-1]["params"] for form in ("paper", "released", "keras", "torch")]
    for index, one in enumerate(ends):
        for other in ends[index + 1 :]:
            assert np.abs(one - other).max() > 1e-3


def test_fedadam_is_by_default_not_the_adam_of_optimizer_libraries():
    algorithm, corrected, m, v = FedAdam(server_lr=0.1), start(), np.zeros(D), np.zeros(D)
    deltas = [np.full(D, size) for size in (1.0, -0.5, 0.25)]
    for t, delta in enumerate(deltas, 1):
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        corrected = corrected + 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + algorithm.tau)
    assert np.abs(after(algorithm, deltas)[-1]["params"] - corrected).min() > 0.01
    libraries = FedAdam(server_lr=0.1, form="torch")
    np.testing.assert_allclose(after(libraries, deltas)[-1]["params"], corrected, rtol=1e-12)


def test_the_form_torch_is_the_adam_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.tensor(start(), requires_grad=True)
    adam = torch.optim.Adam([x], lr=0.03, betas=(0.9, 0.99), eps=1e-3)
    for delta in DELTAS:
        x.grad = torch.tensor(-delta)
        adam.step()
    found = after(FedAdam(form="torch"))[-1]["params"]
    np.testing.assert_allclose(found, x.detach().numpy(), rtol=1e-12)


def test_the_second_moment_starts_at_tau_squared_in_the_paper_alone():
    for cls in (FedAdagrad, FedYogi, FedAdam):
        np.testing.assert_allclose(cls(tau=0.2).init(start())["v"], 0.04, rtol=1e-15)
        np.testing.assert_array_equal(cls(tau=0.2, form="released").init(start())["v"], 0)


def test_fedadagrad_never_forgets_and_fedyogi_moves_in_small_steps():
    spike = [np.full(D, 10.0), *[np.full(D, 0.01)] * 50]
    adagrad, yogi, adam = (after(cls(), spike)[-1]["v"] for cls in (FedAdagrad, FedYogi, FedAdam))
    assert (adagrad > 100).all()
    assert (yogi > 0.99).all()  # it falls by (1 − β₂) Δ² a round, not by a share of itself
    assert (adam < 0.7).all()


def test_fedyogi_stays_where_the_moment_is_the_square():
    algorithm = FedYogi(tau=0.5)
    state = algorithm.update(algorithm.init(start()), {"delta": np.full(D, -0.5)})
    np.testing.assert_array_equal(state["v"], 0.25)


def test_fedlamb_corrects_the_bias_of_its_moments():
    first = after(FedLamb(epsilon=1e-12))[1]
    sign = np.sign(DELTAS[0])
    for layer in LAYERS:
        ratio = np.linalg.norm(start()[layer]) / np.linalg.norm(sign[layer])
        np.testing.assert_allclose(first["params"][layer] - start()[layer], 0.03 * ratio * sign[layer], rtol=1e-9)


def test_fedlars_is_the_lars_of_2020_and_not_that_of_2017():
    algorithm = FedLARS(server_lr=0.1, weight_decay=0.1, epsilon=1e-12)
    newer, older, m, v = start(), start(), np.zeros(D), np.zeros(D)
    for delta in DELTAS:
        m = 0.9 * m + 0.1 * (0.1 * newer - delta)
        newer = newer - 0.1 * np.linalg.norm(newer) / np.linalg.norm(m) * m
        scale = np.linalg.norm(older) / (np.linalg.norm(delta) + 0.1 * np.linalg.norm(older))
        v = 0.9 * v + 0.1 * scale * (0.1 * older - delta)
        older = older - v
    found = after(algorithm, layers=(slice(None),))[-1]["params"]
    np.testing.assert_allclose(found, newer, rtol=1e-10)
    assert np.abs(found - older).max() > 0.05


@pytest.mark.parametrize("cls", [FedLARS, FedLamb])
def test_layers_are_scaled_each_by_itself(cls):
    layered, whole = (after(cls(), layers=layers)[-1]["params"] for layers in (LAYERS, (slice(None),)))
    assert np.abs(layered - whole).max() > 1e-4
    for layer in LAYERS:
        algorithm, alone = cls(), {name: value[layer] for name, value in cls().init(start()).items() if name != "round"}
        state = alone | ({"round": np.zeros(1)} if cls is FedLamb else {})
        for delta in DELTAS:
            state = algorithm.update(state, {"delta": delta[layer]})
        np.testing.assert_allclose(state["params"], layered[layer], rtol=1e-13)


@pytest.mark.parametrize("cls", [FedLARS, FedLamb])
def test_a_layer_of_zeros_moves_by_the_unscaled_step(cls):
    algorithm = cls(server_lr=0.5)
    zero, delta = np.zeros(D), np.full(D, 2.0)
    state = algorithm.update(algorithm.init(zero), {"delta": delta})
    step = 0.1 * 2.0 if cls is FedLARS else 2.0 / (2.0 + algorithm.epsilon)
    np.testing.assert_allclose(state["params"], 0.5 * step, rtol=1e-12)
    still = algorithm.update(algorithm.init(start()), {"delta": zero})
    np.testing.assert_array_equal(still["params"], start())
