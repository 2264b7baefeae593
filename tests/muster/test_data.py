"""`muster data`: what it says of data sets, in words, JSON and pictures."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from simulator.datasets import DATASETS, folder_of
from simulator.datasets.checking import facts_of, label_counts
from simulator.datasets.sources import SOURCES
from simulator.population import Population

DOCUMENT = Path(__file__).parents[2] / "docs" / "datasets.md"


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
        (
            ("wisdm", "--data", "."),
            "name the folder that holds wisdm/ with --data; `muster data show wisdm` says where it comes from",
        ),
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


@pytest.mark.parametrize("classes", [7, 5000])
def test_labels_are_those_of_every_users_own_count(classes):
    source = np.random.default_rng(0)
    shards = [{"x": np.zeros(9, np.float32), "y": source.integers(0, classes, 9)} for _ in range(12)]
    users = Population.of([str(user) for user in range(12)], shards, classes)
    counts = label_counts(users)
    facts = facts_of(users)
    assert facts.labels == counts.sum(0).tolist()
    assert facts.classes_per_user == (counts > 0).sum(1).mean()


def test_each_data_set_on_disk_says_its_source_and_its_files(typed):
    on_disk = [folder_of(name) for name, dataset in DATASETS.items() if dataset.on_disk]
    assert list(SOURCES) == list(dict.fromkeys(on_disk))
    page = DOCUMENT.read_text()
    for source in SOURCES.values():
        for file in (file for names in source.files for file in names if "*" not in file):
            assert file in page, file
    code, output, words = typed("data", "show", "stackoverflow")
    assert code == 0, words
    for says in (
        "https://storage.googleapis.com",
        "ask its publisher",
        "stackoverflow.word_count or stackoverflow_train.h5 and",
        "DIR/stackoverflow/",
    ):
        assert says in output
    assert json.loads(typed("data", "list", "--json")[1])[2]["licence"].startswith("MIT")


def test_check_has_a_line_for_each_finding(typed, tmp_path):
    for folder in ("mnist_10k", "shakespeare", "svmlight", "wisdn"):
        (tmp_path / folder).mkdir()
    np.savez(tmp_path / "mnist_10k" / "mnist_10k.npz", x=np.zeros((4, 28, 28), np.uint8), y=np.zeros(4, np.int64))
    (tmp_path / "svmlight" / "ann.svm").write_text("1 1:0.5\n0 1:2\n")
    code, output, words = typed("data", "check", tmp_path)
    assert code == 1, words
    lines = [" ".join(line.split()) for line in output.splitlines()[2:]]
    assert [line.split()[:2] for line in lines] == [
        *(["shakespeare", "wrong"], ["mnist_10k", "note"], ["mnist_10k", "wrong"]),
        *(["svmlight", "ok"], ["wisdn", "note"]),
    ]
    assert "shakespeare lacks clients.jsonl; `muster data show shakespeare` says its source" in lines[0]
    assert "it holds 4 examples, not 10,000" in lines[2]
    assert "1 users, 2 examples, x float32[2], y int64[], 2 classes" in lines[3]
    assert "did you mean wisdm?" in lines[4]
    assert typed("data", "check", tmp_path / "svmlight")[0] == 0
    (tmp_path / "svmlight" / "ann.svm").write_text("2 1:0.5\n")
    code, output, _ = typed("data", "check", tmp_path / "svmlight", "--json")
    assert (code, json.loads(output)[0]["status"], "ann.svm:1: the label is '2'" in output) == (1, "wrong", True)
    assert typed("data", "check", tmp_path / "none")[0] == 2


def test_check_looks_at_your_own_users(typed, tmp_path):
    np.savez(tmp_path / "ann.npz", x=np.ones((3, 2), np.float32), y=np.arange(3))
    assert "ok" in typed("data", "check", tmp_path)[1]
    np.savez(tmp_path / "bob.npz", x=np.ones((3, 4), np.float32), y=np.arange(3))
    code, output, _ = typed("data", "check", tmp_path)
    assert (code, "all need the same fields" in output) == (1, True)
