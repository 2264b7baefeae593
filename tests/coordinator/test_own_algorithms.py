"""Algorithms that are not built in: a coordinator imports them only from modules that its settings name."""

import sys

import pytest

from coordinator.rules.states import TaskState
from coordinator.settings import Settings
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from fedcore.errors import InvalidSetting, UntrustedAlgorithm
from muster.creating import released
from tests.coordinator.bundles import START, make_bundle
from tests.coordinator.conftest import LINEAGE, RELEASE, Desk, states
from tests.coordinator.test_secure import SECURE

pytestmark = pytest.mark.security("No data is run as code. … There is no pickle")

FEDTWICE = """
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.fed_avg import FedAvg


@dataclass(frozen=True, slots=True)
class FedTwice(FedAvg):
    name: ClassVar[str] = "fedtwice"

    def update(self, state, mean, step=None):
        return {"params": state["params"] + 2.0 * mean["delta"]}
"""
ONE = {"population": "phones", "goal": 1, "rounds": 1, "over_selection": 1.0}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A bundle of an algorithm in the working folder."""
    (tmp_path / "twice_algos.py").write_text(FEDTWICE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "twice_algos", raising=False)
    return make_bundle(tmp_path / "own", algorithm="twice_algos:FedTwice", state={"params": START})


@pytest.fixture
def trusting(database, store, tmp_path):
    """The same store in a coordinator that may import the algorithm's module."""
    with open_coordinator_store(database, tmp_path / "blobs", algorithm_modules=("twice_algos",)) as opened:
        yield opened


def test_a_plan_of_an_algorithm_that_no_setting_names_makes_no_task(store, own):
    with pytest.raises(UntrustedAlgorithm, match="MUSTER_ALGORITHMS=twice_algos"):
        store.register_task(own, TaskSettings(**ONE))
    assert store.tasks() == []
    assert "twice_algos" not in sys.modules


def test_a_release_of_such_a_plan_needs_the_same_setting(own):
    settings = TaskSettings(population="phones", over_selection=1.0, **SECURE)
    with pytest.raises(UntrustedAlgorithm, match="twice_algos"):
        released(own, settings, RELEASE, LINEAGE.signer)
    signed = released(own, settings, RELEASE, LINEAGE.signer, algorithm_modules=["twice_algos"])
    assert signed.signer == RELEASE.signer


def test_an_algorithm_that_the_settings_name_makes_the_next_model(trusting, own):
    task = trusting.register_task(own, TaskSettings(**ONE)).id
    desk = Desk(trusting)
    (given,) = desk.assign("a")
    desk.report(given, delta=(1, 0, 0, 0), weight=2.0)
    assert states(trusting, task) == [(1, 1, "committed", "")]
    assert trusting.checkpoint(task, 1)["params"].tolist() == [START[0] + 2, *START[1:]]


def test_a_task_is_paused_where_the_setting_has_gone(trusting, store, own):
    task = trusting.register_task(own, TaskSettings(**ONE)).id
    Desk(store).turn()
    paused = store.task(task)
    assert paused.state is TaskState.PAUSED
    assert "MUSTER_ALGORITHMS=twice_algos" in paused.reason


def test_settings_of_an_own_algorithm_are_checked_with_its_plan(trusting, own, tmp_path):
    wrong = make_bundle(
        tmp_path / "w", algorithm="twice_algos:FedTwice", settings={"epoch": 1}, state={"params": START}
    )
    with pytest.raises(InvalidSetting, match="did you mean epochs"):
        trusting.register_task(wrong, TaskSettings(**ONE))


def test_modules_are_named_by_commas():
    assert Settings(algorithms=" my_algos, more.algos,").algorithm_modules == ("my_algos", "more.algos")
    assert Settings().algorithm_modules == ()
