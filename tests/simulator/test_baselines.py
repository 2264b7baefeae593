"""Baselines of studies, against closed forms of linear regression and against optimality conditions."""

import functools
from typing import get_args

import numpy as np
import pytest

from export.model import Model
from export.models import load as load_model
from fedcore.algorithms import create
from fedcore.batching import StreamKey, permutation
from fedcore.errors import InvalidSetting
from simulator.configuration import LinearBaseline, SimulationConfig
from simulator.engine import Engine
from simulator.errors import Diverged, EngineError
from simulator.linear_methods import METHODS, CocoaPlus, Dane, LinearProblem, LinearTraining, SparseFsvrg
from simulator.population import Population
from simulator.private_training import Cohorts
from simulator.simulation import simulate
from simulator.training import EngineTraining, LocalOnly

D, SIZES = 3, (6, 11, 4, 8)


def problem(loss, *, l2=0.1, sizes=SIZES, outputs=2):
    """Clients whose examples differ in mean and spread."""
    rng = np.random.default_rng(3)
    features = np.concatenate([rng.normal(k / 3, 1 + k / 4, (n, D)) for k, n in enumerate(sizes)])
    targets = rng.normal(size=(len(features), outputs)) + features @ rng.normal(size=(D, outputs))
    targets = targets if loss == "ridge" else np.where(targets > 0, 1.0, -1.0)
    return LinearProblem(loss, features, targets, np.cumsum([0, *sizes]), l2)


def ridge_optimum(of):
    x, n = of.features, len(of.features)
    return np.linalg.solve(x.T @ x / n + of.l2 * np.eye(D), x.T @ of.targets / n)


def rounds_of(method, of, count):
    """The weights after each round."""
    state = method.init(of)
    for number in range(1, count + 1):
        order = functools.partial(shuffled, number)
        state = method.step(of, state, order)
        yield method.weights(of, state), state


def shuffled(number, client, epoch, examples):
    return permutation(StreamKey(0, number, client), 0, epoch, examples)


def test_a_round_of_dane_on_ridge_is_the_closed_form():
    of, method = problem("ridge"), Dane(l2=0.1, eta=0.9, mu=0.5)
    w = np.zeros((D, 2))
    for after, _ in rounds_of(method, of, 3):
        x, y, n = of.features, of.targets, len(of.features)
        common, expected = x.T @ (x @ w - y) / n + 0.1 * w, np.zeros_like(w)
        for start, end in zip(of.starts[:-1], of.starts[1:], strict=True):
            hessian = x[start:end].T @ x[start:end] / (end - start) + 0.1 * np.eye(D)
            expected += (end - start) / n * (w - np.linalg.solve(hessian + 0.5 * np.eye(D), 0.9 * common))
        np.testing.assert_allclose(after, expected, rtol=1e-10, atol=1e-12)
        w = after


def test_dane_on_clients_with_equal_examples_is_done_in_one_round():
    one = problem("ridge", sizes=(9,))
    of = LinearProblem("ridge", np.tile(one.features, (3, 1)), np.tile(one.targets, (3, 1)), np.arange(4) * 9, 0.1)
    ((weights, _),) = rounds_of(Dane(l2=0.1, mu=0.0), of, 1)
    np.testing.assert_allclose(weights, ridge_optimum(of), rtol=1e-10)


@pytest.mark.parametrize(("method", "count"), [(Dane(l2=0.5, mu=2.0), 100), (CocoaPlus(l2=0.5, epochs=3), 150)])
def test_distributed_optimizers_reach_the_ridge_solution(method, count):
    of = problem("ridge", l2=0.5)
    *_, (weights, _) = rounds_of(method, of, count)
    np.testing.assert_allclose(weights, ridge_optimum(of), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("method", "count"), [(Dane(l2=0.5, mu=1.0), 60), (CocoaPlus(l2=0.5), 40)])
def test_distributed_optimizers_reach_the_optimum_of_logistic_regression(method, count):
    of = problem("logistic", l2=0.5)
    *_, (weights, _) = rounds_of(method, of, count)
    x, y = of.features, of.targets
    slope = -(x.T @ (y / (1 + np.exp(y * (x @ weights))))) / len(x) + 0.5 * weights
    assert np.abs(slope).max() < 1e-5


@pytest.mark.parametrize("loss", ["ridge", "logistic"])
def test_the_dual_of_cocoa_rises_with_every_round_up_to_the_primal(loss):
    of, duals = problem(loss, l2=0.5), []
    for weights, alpha in rounds_of(CocoaPlus(l2=0.5), of, 40):
        if loss == "ridge":
            conjugate = -alpha * of.targets + alpha**2 / 2
        else:
            beta = np.clip(of.targets * alpha, 1e-300, 1 - 1e-16)
            conjugate = beta * np.log(beta) + (1 - beta) * np.log1p(-beta)
        duals.append(-conjugate.sum() / len(alpha) - 0.25 * (weights**2).sum())
        assert duals[-1] <= of.value(weights) + 1e-12
    assert (np.diff(duals) > -1e-12).all()
    assert of.value(weights) - duals[-1] < 1e-4


def test_fsvrg_without_its_scaling_is_the_engines_fsvrg():
    users, lr = regression_users(), 0.7
    engine = Engine(regression_model(), create("fsvrg", {"client_lr": lr}), users)
    of = LinearProblem(
        "ridge", users.fields["x"].astype(np.float64), users.fields["y"][:, None].astype(np.float64), users.starts, 0.0
    )
    start = engine.state["params"][:, None].astype(np.float64)

    def order(client, epoch, examples):
        """That of round 2, the second trip, which counts examples in its pass 0 and trains in its pass 1."""
        return permutation(StreamKey(0, 2, client), 1, epoch, examples)

    expected = SparseFsvrg(l2=0.0, lr=lr, scaled=False).step(of, start, order)
    for number in (1, 2):
        engine.run_round(number, range(len(users)))
    assert np.abs(expected - start).max() > 0.05
    np.testing.assert_allclose(engine.state["params"], expected[:, 0], atol=1e-6)


def sparse_problem():
    """Clients that lack features, one that only the first client has, and one that nobody has."""
    of = problem("logistic", outputs=1)
    features = np.hstack([of.features, np.zeros((len(of.features), 2))])
    features[np.random.default_rng(5).random(features.shape) < 0.5] = 0
    features[: SIZES[0], D], features[:, 0] = 1, 1
    return LinearProblem("logistic", features, of.targets, of.starts, of.l2)


def test_a_round_of_sparse_fsvrg_follows_its_equations():
    of = sparse_problem()
    (x, y), w = (of.features, of.targets[:, 0]), np.full(D + 2, 0.1)

    def slope(v, rows):
        return -(x[rows] * (y[rows] / (1 + np.exp(y[rows] * (x[rows] @ v))))[:, None]).mean(0) + of.l2 * v

    total, n = np.zeros(D + 2), len(x)
    for client, rows in enumerate(of.rows):
        own, v = (x[rows] != 0).mean(0), w.copy()
        scale = [everyone / mine if mine else 1 for everyone, mine in zip((x != 0).mean(0), own, strict=True)]
        for j in shuffled(1, client, 0, SIZES[client]):
            one = slice(rows.start + j, rows.start + j + 1)
            v = v - 0.3 / SIZES[client] * (scale * (slope(v, one) - slope(w, one)) + slope(w, slice(None)))
        total += SIZES[client] / n * (v - w)
    having = [sum((x[rows][:, d] != 0).any() for rows in of.rows) for d in range(D + 2)]
    expected = w + [len(SIZES) / clients if clients else 1 for clients in having] * total
    assert having[D:] == [1, 0]
    found = SparseFsvrg(l2=of.l2, lr=0.3).step(of, w[:, None], functools.partial(shuffled, 1))
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-10, atol=1e-13)


def test_sparse_fsvrg_reaches_the_optimum():
    of = sparse_problem()
    *_, (weights, _) = rounds_of(SparseFsvrg(l2=of.l2, lr=3.0), of, 200)
    assert np.abs(of.gradient(weights)).max() < 1e-6


def test_dane_that_diverges_says_what_helps():
    users = regression_users(classes=2)
    wild = LinearTraining("ridge", Dane(l2=1e-9, eta=1e200), users, users, seed=0)
    with np.errstate(all="ignore"), pytest.raises(Diverged, match="round 1: dane diverged; a higher l2, or mu"):
        wild.run_round(1)


def regression_users(sizes=SIZES, classes=None, seed=4):
    rng = np.random.default_rng(seed)
    shards = [{"x": rng.normal(k / 3, 1, (n, D)).astype(np.float32)} for k, n in enumerate(sizes)]
    for shard in shards:
        shard["y"] = (shard["x"].sum(1) + rng.normal(size=len(shard["x"]))).astype(np.float32)
        if classes:
            shard["y"] = (shard["y"] > 0).astype(np.int64)
    return Population.of([f"u{k}" for k in range(len(sizes))], shards)


def regression_model():
    """⟨w, x⟩ with the loss ½ (⟨w, x⟩ − y)²."""
    return Model(load_model("least_squares", (D,)))


def after_descent(shard, start, lr, steps):
    """The model after so many steps of gradient descent on a least-squares problem, in closed form."""
    x, y = shard["x"].astype(np.float64), shard["y"].astype(np.float64)
    hessian = x.T @ x / len(x)
    optimum = np.linalg.solve(hessian, x.T @ y / len(x))
    return optimum + np.linalg.matrix_power(np.eye(D) - lr * hessian, steps) @ (start - optimum)


def test_pooled_gradient_descent_is_the_closed_form():
    users, model = regression_users(), regression_model()
    descent = create("fedavg", {"client_lr": 0.1, "batch_size": 64})
    training = EngineTraining(Engine(model, descent, users.pooled()), users, Cohorts(1), "as asked")
    for number in range(1, 6):
        training.run_round(number)
    expected = after_descent(users.fields, model.initial, 0.1, 5)
    x, y = users.fields["x"], users.fields["y"]
    losses = 0.5 * (x @ expected - y) ** 2
    found = training.measure(5)["loss"]
    np.testing.assert_allclose(found, np.add.reduceat(losses, users.starts[:-1]) / users.sizes, rtol=1e-4)


def test_pooled_sgd_visits_the_examples_of_all_users_in_one_order():
    users, model = regression_users(), regression_model()
    pooled = users.pooled()
    sgd = create("fedavg", {"client_lr": 0.05, "batch_size": 4, "epochs": 2})
    training = EngineTraining(Engine(model, sgd, pooled, seed=5), pooled, Cohorts(1), "as asked")
    training.run_round(1)
    w, x, y = model.initial.astype(np.float64), users.fields["x"], users.fields["y"]
    for epoch in range(2):
        order = permutation(StreamKey(5, 1, 0), 0, epoch, len(x))
        for start in range(0, len(x), 4):
            rows = order[start : start + 4]
            w = w - 0.05 * x[rows].T @ (x[rows] @ w - y[rows]) / len(rows)
    assert training.measure(1)["loss"] == pytest.approx([(0.5 * (x @ w - y) ** 2).mean()], rel=1e-4)


def test_local_only_training_is_every_users_own_descent():
    users, model = regression_users((30, 41, 24)), regression_model()
    descent = create("fedavg", {"client_lr": 0.1, "batch_size": 64})
    training = LocalOnly(model, descent, users, held_out=0.25, seed=2, device="cpu")
    for number in range(1, 5):
        training.run_round(number)
    train, test = users.split_examples(0.25, 2)
    for user, loss in enumerate(training.measure(4)["loss"]):
        w, held = after_descent(train.shard(user), model.initial, 0.1, 4), test.shard(user)
        assert loss == pytest.approx((0.5 * (held["x"] @ w - held["y"]) ** 2).mean(), rel=1e-4)


def test_local_models_know_nothing_of_other_users():
    users, model = regression_users(), regression_model()
    fields = {name: array.copy() for name, array in users.fields.items()}
    fields["y"][: users.starts[1]] += 5
    losses = []
    for given in (users, Population(users.clients, fields, users.starts)):
        training = LocalOnly(model, create("fedavg"), given, held_out=0.25, seed=2, device="cpu")
        training.run_round(1)
        losses.append(training.measure(1)["loss"])
    assert losses[0][0] != losses[1][0]
    np.testing.assert_array_equal(losses[0][1:], losses[1][1:])


def test_examples_are_split_within_each_user_and_none_is_in_both():
    users = regression_users((5, 1, 2, 12))
    train, test = users.split_examples(0.3, 1)
    assert train.clients == test.clients == ("u0", "u2", "u3")
    assert list(test.sizes) == [2, 1, 4]
    for index, user in enumerate((0, 2, 3)):
        parts = np.concatenate([train.shard(index)["y"], test.shard(index)["y"]])
        np.testing.assert_array_equal(np.sort(parts), np.sort(users.shard(user)["y"]))


@pytest.mark.parametrize(
    ("baseline", "model", "cohort", "at_least"),
    [
        ("pooled", "logreg", 1, 0.7),
        pytest.param("local", "logreg", 75, 0.3, marks=pytest.mark.long),
        ("dane", "ridge", 60, 0.6),
        ("cocoa", "ridge", 60, 0.6),
    ],
)
def test_every_baseline_learns_digits_and_repeats_itself(baseline, model, cohort, at_least):
    config = SimulationConfig(model=model, baseline=baseline, rounds=1)
    first, again = simulate(config), simulate(config)
    assert first == again
    assert (first.baseline, first.cohort) == (baseline, cohort)
    assert f"{model} on digits, {baseline}, 1 rounds" in first.words
    assert first.test_accuracy > at_least
    assert 0 < first.user_mean <= 1
    assert first.curve[-1]["test.accuracy"] == first.test_accuracy


def test_every_linear_baseline_has_its_method():
    assert set(METHODS) == set(get_args(LinearBaseline))


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (
            {"baseline": "poled"},
            EngineError,
            "baseline must be one of pooled, local, dane, cocoa, sparse_fsvrg, not 'poled'",
        ),
        ({"baseline": "dane", "model": "mlp"}, EngineError, "dane trains a linear model: ridge or logistic, not 'mlp'"),
        ({"baseline": "cocoa", "settings": {"l2": 0}}, InvalidSetting, "cocoa: l2 must be a number above 0"),
    ],
)
def test_impossible_baselines_are_named(wrong, error, words):
    with pytest.raises(error, match=words):
        simulate(SimulationConfig(**{"model": "ridge", "rounds": 1} | wrong))
