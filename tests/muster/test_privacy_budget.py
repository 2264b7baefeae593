"""`muster privacy budget` on the store, over HTTP and from Python."""

import json
import os

import pytest

import muster
from coordinator.errors import BudgetExceeded, InvalidBudget
from coordinator.rules.budget import PopulationBudget
from coordinator.rules.task_settings import PrivacyBudget, TaskSettings
from tests.coordinator.bundles import make_bundle, make_private_bundle
from tests.muster.test_cli import in_process
from tests.muster.test_remote import failure
from tests.muster.test_remote import served as served  # noqa: PLC0414 - a fixture

ONE = PrivacyBudget(epsilon=1.0, delta=1e-6, users=1000)
PHONES = ("privacy", "budget", "--population", "phones")


@pytest.fixture
def task(served, tmp_path):
    _, _, store, _ = served
    settings = TaskSettings(population="phones", goal=2, rounds=2, privacy=ONE)
    return store.register_task(make_private_bundle(tmp_path / "private"), settings, name="the first").id


def test_budget_is_set_shown_and_removed_on_the_store_and_over_http(served, task):
    near, far, store, _ = served
    for where in (near, far):
        shown = in_process(*PHONES, "--epsilon", 2, "--delta", "1e-6", *where)
        assert shown.exit_code == 0, shown.output
        line = next(line for line in shown.stdout.splitlines() if task in line)
        assert line.split() == [task, "the", "first", "training", "active", "0", "of", "2", "1", "1"]
        facts = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines()[-4:] if line)
        assert facts["left"] == "ε 1"
        assert facts["budget"] == "ε 2 at δ 1e-06"
        assert "a device that enrols anew is a new one" in facts["of"]
        assert json.loads(in_process(*PHONES, "--json", *where).stdout)["left"] == pytest.approx(1)
        removed = in_process(*PHONES, "--remove", *where)
        assert "none is set: no task is refused" in removed.stdout
    assert store.budget("phones").budget is None


def test_half_a_budget_is_refused_with_what_is_missing(served, task):
    near = served[0]
    for given in (["--epsilon", 2], ["--delta", "1e-6"]):
        assert "give both" in in_process(*PHONES, *given, *near).stderr
    assert "leave --epsilon and --delta out" in in_process(*PHONES, "--remove", "--epsilon", 2, *near).stderr
    for where in served[:2]:
        kind, words = failure(in_process(*PHONES, "--epsilon", "nan", "--delta", "1e-6", *where))
        assert kind is InvalidBudget
        assert words.startswith("epsilon must be a number above 0 and at most 1,000,000, not nan")


def test_python_has_the_budget_and_the_refusal_of_a_task(served, task, tmp_path):
    _, far, store, _ = served
    with muster.Coordinator(far[1], os.environ["MUSTER_TOKEN"]) as coordinator:
        made = coordinator.set_budget("phones", epsilon=1.5, delta=1e-6)
        assert made == coordinator.budget("phones") == store.budget("phones")
        assert made.budget == PopulationBudget(epsilon=1.5, delta=1e-6)
        with pytest.raises(BudgetExceeded, match="'hand-made' promises no privacy"):
            coordinator.create(make_bundle(tmp_path / "plan"), population="phones", goal=2, rounds=2)
        assert coordinator.remove_budget("phones").budget is None
