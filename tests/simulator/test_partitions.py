"""Partitions by name: every example goes to one client, and clients differ in the way that the name says."""

import numpy as np
import pytest

from simulator import datasets
from simulator.errors import DatasetError
from simulator.partitions import _drawn, dealt
from simulator.population import Population

CLASSES, EXAMPLES = 20, 800
NAMES = ["dirichlet:0.3", "pachinko", "pachinko:0.1,10", "shards:2", "quantity:0.5", "quantity"]


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
