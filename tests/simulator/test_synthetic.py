"""Synthetic data sets: they have the structure that their papers say, by arithmetic of the tests' own."""

import numpy as np
import pytest

from export.model import Model
from export.models import load as load_model
from fedcore.algorithms import create
from simulator.datasets.leaf import svmlight
from simulator.datasets.synthetic import CURVATURE_SPREAD, minimum, quadratics, sparse_logistic, synthetic
from simulator.engine import Engine
from simulator.errors import DatasetError
from simulator.population import Population

STEPS, RATE = 5, 0.3


def of_client(users, client):
    """Features and labels of a client, float64."""
    return (users.shard(client)[name].astype(np.float64) for name in ("x", "y"))


def curvatures(users):
    """h_i of every client: the diagonals of their Hessians."""
    hessians = [x.T @ x / len(x) for x, _ in (of_client(users, client) for client in range(len(users)))]
    for hessian in hessians:
        np.testing.assert_array_equal(hessian, np.diag(np.diag(hessian)))
    return np.array([np.diag(hessian) for hessian in hessians])


def minima(users):
    """o_i of every client."""
    return np.array([np.linalg.solve(*of_client(users, client)) for client in range(len(users))])


def trained(algorithm, settings, users, rounds):
    """The model after rounds of all clients, from the engine."""
    settings = {"client_lr": RATE, "epochs": STEPS, "batch_size": 16} | settings
    engine = Engine(Model(load_model("least_squares")), create(algorithm, settings), users)
    for number in range(1, rounds + 1):
        engine.run_round(number, range(len(users)))
    return engine.state["params"]


def test_quadratics_have_the_dissimilarity_and_condition_asked_for():
    users = quadratics(clients=10, dissimilarity=3.0, condition=50.0, dimensions=16)
    h, o = curvatures(users), minima(users)
    gradients = h * (minimum(16) - o)
    np.testing.assert_allclose(gradients.mean(0), 0, atol=1e-5)
    assert np.sqrt((gradients**2).sum(1).mean()) == pytest.approx(3.0, rel=1e-5)
    np.testing.assert_allclose(h.mean(0)[[0, -1]], [1, 1 / 50], rtol=1e-5)
    assert np.abs(h / h.mean(0) - 1).max() == pytest.approx(CURVATURE_SPREAD, rel=1e-5)


@pytest.mark.parametrize("dissimilarity", [1.0, 10.0])
def test_fedavg_ends_at_its_fixed_point_scaffold_at_the_minimum(dissimilarity):
    users = quadratics(clients=6, dissimilarity=dissimilarity, condition=4.0)
    pull = 1 - (1 - RATE * curvatures(users)) ** STEPS
    fixed = (pull * minima(users)).sum(0) / pull.sum(0)
    drift = np.linalg.norm(fixed - minimum(16))
    assert drift > 0.02 * dissimilarity
    assert np.linalg.norm(trained("fedavg", {}, users, 60) - fixed) < 1e-3 * drift
    assert np.linalg.norm(trained("scaffold", {}, users, 150) - minimum(16)) < 1e-3 * drift


def test_fedprox_synthetic_differs_by_alpha_and_beta():
    same, apart = synthetic(alpha=0.0, beta=0.0), synthetic(alpha=0.0, beta=5.0)
    assert same.fields["x"].shape[1] == 60
    assert same.sizes.min() >= 50
    assert same.sizes.max() > 5 * np.median(same.sizes)

    def spread_of_means(users):
        return np.std([users.shard(client)["x"].mean() for client in range(len(users))])

    assert spread_of_means(apart) > 5 * spread_of_means(same)
    assert len(np.unique(synthetic(alpha=4.0).fields["y"])) == 10


def test_sparse_logistic_users_have_words_of_their_own():
    users = sparse_logistic(users=100, features=500)
    x = users.fields["x"]
    assert set(np.unique(x)) == {0.0, 1.0}
    assert (x[:, -1] == 1).all()
    frequencies = np.sort(x[:, :-1].mean(0))
    assert frequencies[-1] > 20 * np.median(frequencies)
    having = np.add.reduceat(x, users.starts[:-1]) > 0
    assert np.median(having.sum(0)) < len(users) / 3
    rates = np.add.reduceat(users.fields["y"], users.starts[:-1]) / users.sizes
    assert rates.std() > 0.1
    assert users.sizes.max() > 4 * np.median(users.sizes)


def test_svmlight_files_are_read_as_users(tmp_path):
    (tmp_path / "svmlight").mkdir()
    (tmp_path / "svmlight" / "ada.svm").write_text("+1 1:0.5 4:2 # a post\n\n-1 3:1\n")
    (tmp_path / "svmlight" / "bob.svm").write_text("0 2:1\n1\n")
    users = svmlight(tmp_path)
    assert users.clients == ("ada", "bob")
    np.testing.assert_array_equal(
        users.fields["x"], [[0.5, 0, 0, 2, 1], [0, 0, 1, 0, 1], [0, 1, 0, 0, 1], [0, 0, 0, 0, 1]]
    )
    assert users.fields["y"].tolist() == [1, 0, 0, 1]
    assert users.sizes.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2 1:1\n", "ada.svm:1: the label is '2'"),
        ("1 1:1\n1 x:1\n", "ada.svm:2: 'x:1' is not index:value"),
        ("1 1:1_0\n", "'1:1_0' is not index:value"),
        ("1 1:1 2:1 1:3\n", "ada.svm:1: index 1 is there twice"),
        ("1 0:1\n", "index from 1"),
        ("1 1:nan\n", "finite value"),
        ("1 1:1e300\n", "'1:1e300' needs an index from 1 and a finite value of float32"),
        (f"{'x' * 5000} 1:1\n", f"the label is '{'x' * 80}'"),
        (f"1 {'9' * 5000}:1\n", f"'{'9' * 80}' is not index:value"),
        ("# nothing\n", "holds no examples"),
        ("1 999999999:1\n", "leave rare features out"),
    ],
)
def test_a_malformed_svmlight_file_is_named_with_its_line(tmp_path, text, words):
    (tmp_path / "svmlight").mkdir()
    (tmp_path / "svmlight" / "ada.svm").write_text(text)
    with pytest.raises(DatasetError, match=words):
        svmlight(tmp_path)


def test_a_folder_without_svmlight_files_is_named(tmp_path):
    with pytest.raises(DatasetError, match=f"{tmp_path}/svmlight holds no file USER.svm"):
        svmlight(tmp_path)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (quadratics, {"clients": 1}),
        (quadratics, {"dissimilarity": -1.0}),
        (quadratics, {"condition": 0.5}),
        (synthetic, {"alpha": -1.0}),
        (sparse_logistic, {"features": 10}),
    ],
)
def test_numbers_out_of_range_are_refused(make, options):
    with pytest.raises(DatasetError, match=str(next(iter(options.values())))):
        make(**options)


@pytest.mark.parametrize("make", [quadratics, synthetic, sparse_logistic])
def test_a_seed_makes_one_synthetic_data_set_and_another_another(make):
    one, same, other = make(seed=1), make(seed=1), make(seed=2)
    assert isinstance(one, Population)
    np.testing.assert_array_equal(one.fields["x"], same.fields["x"])
    assert one.fields["y"].tolist() != other.fields["y"].tolist()
