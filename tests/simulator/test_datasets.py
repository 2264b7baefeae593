"""Data sets by name: what their files hold, as clients."""

import json

import numpy as np
import pytest

from simulator import datasets
from simulator.datasets.bundled import CHARACTERS, END, START, UNKNOWN, WINDOW, tokens, windows
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
