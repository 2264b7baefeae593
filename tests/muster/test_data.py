"""`muster data`: what it says of data sets, in words, JSON and pictures."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from simulator.datasets import DATASETS
from simulator.datasets.facts import facts_of, label_counts
from simulator.population import Population


def test_list_names_every_data_set(typed):
    code, output, words = typed("data", "list")
    assert code == 0, words
    assert [line.split()[0] for line in output.splitlines()[2:]] == list(DATASETS)
    listed = json.loads(typed("data", "list", "--json")[1])
    assert [one["name"] for one in listed] == list(DATASETS)
    assert listed[0]["clients"] == 75


def test_show_tells_users_sizes_and_classes(typed):
    code, output, words = typed("data", "show", "digits")
    assert code == 0, words
    assert "75" in output
    assert "1797" in output
    assert "█" * 40 in output
    facts = json.loads(typed("data", "show", "digits", "--partition", "shards:2", "--clients", 30, "--json")[1])
    assert (facts["users"], facts["classes"], sum(facts["labels"])) == (30, 10, 1797)
    assert facts["per_user"]["p0"] >= 58
    assert facts["classes_per_user"] < 4
    assert facts["fields"] == {"x": "float32[1, 8, 8]", "y": "int64[]"}


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_show_draws_the_mix_of_classes(typed, tmp_path, ending):
    picture = tmp_path / f"mix.{ending}"
    code, _, words = typed("data", "show", "digits", "--out", picture)
    assert code == 0, words
    if ending == "svg":
        assert "user, by largest class" in "".join(ElementTree.parse(picture).getroot().itertext())
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "no data set is called 'nowhere'"),
        (("wisdm",), "say where with --data=DIR"),
        (("digits", "--out", "mix.pdf"), "must end in .svg or .png"),
        (("quadratics", "--out", "mix.png"), "quadratics has no classes to draw"),
        (("digits", "--out", "none/mix.png"), "error: none/mix.png cannot be written: No such file or directory"),
    ],
)
def test_show_says_what_is_wrong(typed, arguments, message):
    code, _, words = typed("data", "show", *arguments)
    assert code == (1 if "written" in message else 2)
    assert message in " ".join(words.split())


def test_tokens_are_counted_without_padding():
    users = Population.of(
        ["a", "b"],
        [{"x": np.array([[1, 2]]), "y": np.array([[2, 0]])}, {"x": np.array([[3, 3]]), "y": np.array([[3, 3]])}],
    )
    np.testing.assert_array_equal(label_counts(users), [[0, 0, 1, 0], [0, 0, 0, 2]])
    assert facts_of(users).labels == [0, 0, 1, 2]
    assert facts_of(Population.of(["a"], [{"x": np.zeros(3, np.float32)}])).labels == []
