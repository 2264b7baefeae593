"""Data sets: built in, divided, and synthetic."""

import json

import numpy as np
import pytest

from export.model import Model
from export.models import load as load_model
from fedcore.algorithms import create
from simulator import datasets
from simulator.datasets.bundled import CHARACTERS, END, START, UNKNOWN, WINDOW, tokens, windows
from simulator.datasets.partitions import (
    CURVATURE_SPREAD,
    _drawn,
    dealt,
    minimum,
    quadratics,
    sparse_logistic,
    synthetic,
)
from simulator.datasets.user_files import svmlight
from simulator.engine import Engine
from simulator.errors import DatasetError
from simulator.population import Population


def spoken(row):
    """The text of tokens, an utterance a line."""
    return "".join("" if token in {0, START} else "|" if token == END else CHARACTERS[token - 1] for token in row)


def test_omniglot_has_100_writers_of_136_characters(data):
    writers = datasets.load("omniglot", data)
    assert len(writers) == 100
    assert (writers.shape, writers.classes) == ((1, 28, 28), 136)
    assert (writers.sizes.min(), writers.sizes.max()) == (22, 40)
    assert (writers.fields["x"].min(), writers.fields["x"].max()) == (0, 1)
    first = writers.shard(0)
    assert len(set(first["y"])) == len(first["y"])


def test_shakespeare_has_299_roles_who_speak_in_windows_of_80(data):
    roles = datasets.load("shakespeare", data)
    assert len(roles) == 299
    assert (roles.shape, roles.classes) == ((80,), len(CHARACTERS) + 4)
    citizen = roles.shard(roles.clients.index("First Citizen"))
    assert spoken(citizen["x"][0]).startswith("Before we proceed any further, hear me speak.|You are all")
    np.testing.assert_array_equal(citizen["y"][0, :-1], citizen["x"][0, 1:])
    assert UNKNOWN not in roles.fields["x"]


def test_windows_predict_every_token_but_the_first_once():
    for length in (2, WINDOW, WINDOW + 1, WINDOW + 2, 3 * WINDOW + 7):
        stream = np.arange(1, length + 1)
        found = windows(stream)
        assert found["y"][found["y"] != 0].tolist() == stream[1:].tolist()
        np.testing.assert_array_equal(found["x"].ravel()[: length - 1], stream[:-1])
    assert len(windows(tokens([]))["x"]) == 0
    assert tokens(["é"]).tolist() == [START, UNKNOWN, END]


def test_a_users_newest_examples_are_held_out_without_a_seed():
    users = Population.of(["a", "b", "c"], [{"t": np.arange(size)} for size in (10, 2, 1)])
    train, test = users.split_examples(0.2, seed=None)
    assert [train.shard(user)["t"].tolist() for user in range(2)] == [list(range(8)), [0]]
    assert [test.shard(user)["t"].tolist() for user in range(2)] == [[8, 9], [1]]


def test_a_subset_keeps_the_classes_of_the_whole():
    users = Population.of(["a", "b"], [{"x": np.zeros((1, 3), np.float32), "y": np.array([label])} for label in (1, 6)])
    assert (users.shape, users.classes) == ((3,), 7)
    for fewer in (users.subset([0]), users.split(0.5, seed=0)[0], users.spread(2), users.pooled()):
        assert fewer.classes == 7
    assert Population.of(["a"], [{"v": np.zeros(3, np.float32)}]).classes is None


def test_a_damaged_file_of_shakespeare_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"holds no folder shakespeare; name .* with --data"):
        datasets.load("shakespeare", tmp_path)
    path = tmp_path / "shakespeare" / "clients.jsonl"
    path.parent.mkdir()
    for damaged in (b"\xff", b'{"client": "Hamlet"}', b'{"client": "Hamlet", "lines": [1]}'):
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"clients\.jsonl is not the data set it should be"):
            datasets.load("shakespeare", tmp_path)
    path.write_text(json.dumps({"client": "Hamlet", "lines": []}))
    with pytest.raises(DatasetError, match=r"clients without examples: .*Hamlet"):
        datasets.load("shakespeare", tmp_path)


CLASSES, EXAMPLES = 20, 800
NAMES = ["dirichlet:0.3", "pachinko", "pachinko:0.1,10", "pathological:2", "quantity", "linear", "exponential:50"]


def pooled():
    """Examples that are numbered, of 20 classes, five in each coarse class."""
    number = np.arange(EXAMPLES)
    return Population.of(["everybody"], [{"n": number, "y": number % CLASSES, "coarse": number % CLASSES // 5}])


def three_users():
    return Population.of(["a", "b", "c"], [{"n": np.arange(9)}, {"n": np.arange(9, 11)}, {"n": np.arange(11, 40)}])


def classes_of(users, field="y"):
    """How many classes a client has, on average."""
    return np.mean([len(np.unique(users.shard(client)[field])) for client in range(len(users))])


@pytest.mark.parametrize("name", NAMES)
def test_every_example_goes_to_one_client(name):
    users = dealt(pooled(), name, 30)
    assert len(set(users.clients)) == 30
    assert sorted(users.fields["n"]) == list(range(EXAMPLES))
    assert users.classes == CLASSES
    for client in range(30):
        shard = users.shard(client)
        np.testing.assert_array_equal(shard["y"], shard["n"] % CLASSES)


@pytest.mark.parametrize("name", NAMES)
def test_a_partition_follows_its_seed(name):
    first, again, other = (dealt(pooled(), name, 30, seed).fields["n"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("name", ["dirichlet:0.3", "pachinko", "shards:2"])
def test_clients_have_equal_shares_give_or_take_an_example(name):
    assert set(dealt(pooled(), name, 50).sizes) == {16}
    assert set(dealt(pooled(), name.replace("shards:2", "dirichlet"), 30).sizes) == {26, 27}


def test_a_smaller_alpha_gives_fewer_classes():
    few, some, all_of_them = (classes_of(dealt(pooled(), f"dirichlet:{alpha}", 10)) for alpha in (0.05, 1, 1000))
    assert few < some < all_of_them
    assert all_of_them > CLASSES - 2


def test_pachinko_draws_coarse_classes_before_classes():
    users = dealt(pooled(), "pachinko:0.01,1000", 20)
    assert classes_of(users, "coarse") < 2
    assert classes_of(users) > 4 * classes_of(users, "coarse")


def test_a_client_of_two_shards_has_few_classes():
    users = dealt(pooled(), "shards:2", 20)
    assert set(users.sizes) == {40}
    assert max(len(np.unique(users.shard(client)["y"])) for client in range(20)) <= 4


def test_quantity_skews_sizes_and_not_classes():
    skewed, even = (dealt(pooled(), f"quantity:{beta}", 20) for beta in (0.2, 1000))
    assert skewed.sizes.max() > 4 * EXAMPLES / 20 > even.sizes.max()
    assert skewed.sizes.min() >= 1
    assert len(np.unique(skewed.shard(int(skewed.sizes.argmax()))["y"])) == CLASSES


def test_linear_and_exponential_sizes_grow_as_they_are_called():
    linear, exponential = (dealt(pooled(), name, 20).sizes for name in ("linear", "exponential:50"))
    assert set(np.diff(linear[1:])) <= {3, 4, 5}
    assert list(exponential) == sorted(exponential)
    assert exponential[-1] / exponential[-11] == pytest.approx(50 ** (10 / 19), rel=0.1)


def test_natural_is_by_user():
    natural = datasets.load("synthetic", clients=12, partition="natural")
    assert natural.clients == datasets.load("synthetic", clients=12).clients
    with pytest.raises(DatasetError, match="natural is by user, and data set 'digits' has none"):
        datasets.load("digits", partition="natural")


def test_shuffled_keeps_sizes_and_mixes_users():
    users = dealt(three_users(), "shuffled", 3)
    assert users.sizes.tolist() == [9, 2, 29]
    assert sorted(users.fields["n"]) == list(range(40))
    assert not set(users.clients) & {"a", "b", "c"}
    assert users.shard(0)["n"].max() >= 9


def test_omniglot_is_dealt_by_alphabet_and_shuffled_across_writers(data):
    writers = datasets.load("omniglot", data)
    pachinko = datasets.load("omniglot", data, 50, "pachinko:0.01,10")
    assert len(pachinko) == 50
    assert classes_of(pachinko, "coarse") < 2
    shuffled = datasets.load("omniglot", data, partition="shuffled")
    np.testing.assert_array_equal(shuffled.sizes, writers.sizes)
    assert classes_of(writers, "coarse") == 1 < classes_of(shuffled, "coarse")


@pytest.mark.parametrize(
    ("name", "clients", "message"),
    [
        ("dirichlet:0.3", 41, "40 examples cannot be split over 41"),
        ("quantity", 0, "40 examples cannot be split over 0"),
        ("dirichlet", 3, r"integer in field 'y'; there is none among \['n'\]"),
        ("shuffled", 4, "shuffled keeps the number of users, 3"),
        ("diriclet", 3, "did you mean dirichlet"),
        ("quantity:0", 3, "partition 'quantity:0': quantity: beta must be a number above 0, not '0'"),
        ("quantity:1,2", 3, "quantity takes beta"),
        ("shuffled:1", 3, "shuffled takes no numbers"),
        ("shards:x", 3, "per_client must be a whole number"),
    ],
)
def test_a_partition_that_cannot_be_is_refused(name, clients, message):
    with pytest.raises(DatasetError, match=message):
        dealt(three_users(), name, clients)


def test_a_data_set_without_users_cannot_be_shuffled():
    with pytest.raises(DatasetError, match="this data set has no users: take dirichlet"):
        dealt(pooled(), "shuffled", 1)


def test_more_shards_than_examples_are_refused():
    with pytest.raises(DatasetError, match="800 examples cannot be cut into 802 shards"):
        dealt(pooled(), "shards:2", 401)


def test_more_clients_than_users_need_a_named_partition(data):
    with pytest.raises(DatasetError, match="28 users; to deal their examples to 40 clients, say how"):
        datasets.load("wisdm", data, 40)
    assert len(datasets.load("wisdm", data, 40, "shards:3")) == 40
    assert set(datasets.load("wisdm", data, 9).clients) < set(datasets.load("wisdm", data).clients)
    assert len(datasets.load("wisdm", data, partition="dirichlet:0.5")) == 28


def test_generated_data_sets_have_as_many_clients_as_asked():
    assert [len(datasets.load("synthetic", clients=count)) for count in (None, 7)] == [30, 7]
    assert len(datasets.load("synthetic", clients=12, partition="quantity")) == 12
    assert datasets.load("quadratics", clients=4).classes is None


def test_a_class_is_drawn_as_numpy_chooses_it():
    ours, numpys, source = (np.random.default_rng(seed) for seed in (0, 0, 1))
    for _ in range(1000):
        wanted, left = source.dirichlet(np.full(10, 0.3)), source.integers(0, 3, 10)
        left[0] += 1
        weights = np.where(left > 0, wanted + 1e-12, 0)
        assert _drawn(wanted, list(left), ours) == numpys.choice(10, p=weights / weights.sum())


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
