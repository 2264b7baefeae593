"""`muster algorithms`: what it lists and shows is what the algorithms themselves say."""

import json

import pytest
from typer.testing import CliRunner

from fedcore.algorithms import ALGORITHMS
from fedcore.errors import InvalidSetting, UnknownAlgorithm
from muster.app import app


def muster(*words):
    return CliRunner().invoke(app, ["algorithms", *words], catch_exceptions=False)


def test_every_algorithm_is_listed_with_its_sizes():
    lines = {line.split()[0]: line for line in muster("list").stdout.splitlines()[2:]}
    assert list(lines) == list(ALGORITHMS)
    assert lines["fedadam"].split()[1:6] == ["server", "optimizer", "d", "d", "3d"]
    assert "Reddi, ICLR 2021, Algorithm 2" in lines["fedadam"]


def test_the_list_as_json_holds_sizes_as_numbers():
    found = {one["name"]: one for one in json.loads(muster("list", "--json").stdout)}
    assert list(found) == list(ALGORITHMS)
    assert found["fedavg"]["trips"][0]["up"] == {"delta": {"per_parameter": 1, "constant": 0}}


def test_an_algorithm_is_shown_with_equations_and_what_each_side_does():
    shown = muster("show", "mimelite", "--set", "optimizer=adam").stdout
    assert "V: m ← β₁ m + (1 − β₁) c" in shown
    lines = dict(line.split("  ", 1) for line in shown.splitlines() if "  " in line and line[0].isalpha())
    assert lines["device receives"].strip() == "params (d), m (d), v (d)"
    assert lines["device runs"].strip().startswith("train (1 × all examples in batches of 20), then sweep")
    assert lines["server keeps"].strip() == "params (d), m (d), v (d)"
    assert lines["beta1"].split()[:2] == ["0.9", "a"]


def test_settings_of_a_shown_algorithm_can_be_given():
    given = json.loads(muster("show", "fedavg", "--set", "epochs=3", "--json").stdout)
    assert {one["name"]: one["value"] for one in given["settings"]}["epochs"] == 3
    assert given["trips"][0]["passes"][0]["epochs"] == 3


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["show", "fedavgg"], UnknownAlgorithm, "did you mean fedavg"),
        (["show", "fedavg", "--set", "epoch=1"], InvalidSetting, "did you mean epochs"),
    ],
)
def test_a_misspelt_name_gets_the_closest_match(words, error, says):
    with pytest.raises(error, match=says):
        muster(*words)
