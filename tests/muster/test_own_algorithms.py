"""Commands with an algorithm of a user's own, in a file of the working folder."""

import json
import shlex
import sys

import pytest
from typer.testing import CliRunner

from coordinator.store.tasks import open_coordinator_store
from fedcore.errors import InvalidAlgorithm, UntrustedAlgorithm
from muster.app import app

MY_ALGOS = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcore.algorithms.fed_avg import FedAvg


@dataclass(frozen=True, slots=True)
class FedMine(FedAvg):
    name: ClassVar[str] = "fedmine"

    def update(self, state, mean, step=None):
        return {"params": state["params"] + 0.5 * mean["delta"]}


@dataclass(frozen=True, slots=True)
class FedRoot(FedAvg):
    name: ClassVar[str] = "fedroot"

    def report(self, broadcast, carries):
        return {"delta": np.sqrt(carries["train"]["params"])}
"""


@pytest.fixture
def muster(tmp_path, monkeypatch):
    (tmp_path / "my_algos.py").write_text(MY_ALGOS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_algos", raising=False)
    return lambda *words: CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_an_own_algorithm_is_exported_shown_and_verified_if_named(muster, monkeypatch):
    made = muster("export", "logreg", "--algorithm", "my_algos:FedMine", "--out", "plan")
    assert "my_algos:FedMine" in made.stdout
    setting, *create = next(shlex.split(line) for line in made.stderr.splitlines() if "task create" in line)
    assert (setting, create[0]) == ("MUSTER_ALGORITHMS=my_algos", "muster")
    with pytest.raises(UntrustedAlgorithm, match="if you trust its code, name it with --algorithm"):
        muster("plan", "verify", "plan")
    assert "ok: " in muster("plan", "verify", "plan", "--algorithm", "my_algos:FedMine").stdout
    open_coordinator_store("sqlite:///muster.db", "muster-blobs").close()
    with pytest.raises(UntrustedAlgorithm, match=setting):
        muster(*create[1:])
    monkeypatch.setenv(*setting.split("="))
    created = json.loads(muster(*create[1:], "--json").stdout)
    assert (created["algorithm"]["name"], created["bundle"]) == ("my_algos:FedMine", "logreg-fedmine")


def test_an_own_algorithm_is_shown_and_simulated(muster):
    assert json.loads(muster("algorithms", "show", "my_algos:FedMine", "--json").stdout)["name"] == "fedmine"
    words = ["--algorithm", "my_algos:FedMine", "--model", "logreg", "--rounds", "1", "--cohort", "2", "--json"]
    assert json.loads(muster("simulate", *words).stdout)["algorithm"] == "fedmine"


@pytest.mark.parametrize(
    "words",
    [
        ("export", "logreg", "--out", "plan", "--algorithm"),
        ("simulate", "--model", "logreg", "--rounds", "1", "--algorithm"),
        ("algorithms", "show"),
    ],
)
def test_an_algorithm_that_breaks_the_contract_is_refused_with_its_line(muster, words, tmp_path):
    says = r"fedroot: report: np.sqrt is no operator.*\(my_algos.py:23: return"
    with pytest.raises(InvalidAlgorithm, match=says):
        muster(*words, "my_algos:FedRoot")
    assert not (tmp_path / "plan").exists()
