"""Devices in a real browser: the page of a coordinator, whose rounds count what a person drew there."""

import numpy as np
import pytest

from coordinator.rules.aggregation import aggregate
from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.signing import SigningKey
from muster.browser import BrowserMissing, phone
from tests.coordinator.fork_server import wait_until
from tests.device_runtime.pages import Person, build
from tests.device_runtime.test_typescript_rounds import ALGORITHM, values_in


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return build(tmp_path_factory.mktemp("page") / "built")


@pytest.fixture(scope="module")
def opened():
    try:
        with phone() as browser:
            yield browser
    except BrowserMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def browser(opened):
    opened.get("about:blank")
    opened.get_log("browser")
    return opened


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return export_bundle(Model(load("logreg", (1, 8, 8), 10), 3), ALGORITHM, tmp_path_factory.mktemp("plan") / "plan")


def test_a_round_counts_what_a_person_drew_in_a_browser(tmp_path, coordinators, bundle, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local:
        settings = TaskSettings(population="p", goal=1, rounds=1, over_selection=1.0, seed=2**53 + 3)
        task = local.create_task(bundle, settings, SigningKey.new(tmp_path / "release.pem")).id
        person = Person(browser, local.url, "p")
        person.open()
        for digit in (0, 1, 7):
            person.draw(digit)
        person.press("take-part")
        wait_until(lambda: [one.state for one in local.store.rounds(task)] == ["committed"])
        person.sees("state", "Done: round 1, 3 examples, in clear")
        person.sees("plan", "650 numbers")
        person.sees("entries", "A report on 3 examples")
        (row,) = local.store.cohort(task, 1)
        plan, before, result = values_in(local.store, task, 1, row.slot, person.examples())
        report = plan.report.weigh(result.values, result.weight).astype(np.float64)
        expected = aggregate(plan.report, ALGORITHM, before, report).state["params"]
        after = local.store.checkpoint(task, 1)["params"]
        assert browser.get_log("browser") == []
    np.testing.assert_allclose(after, expected, atol=1e-5)
    assert np.abs(after - before["params"]).max() > 1e-3
