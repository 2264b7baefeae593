"""Mixed fleets: devices in Python, on Node, in a browser and on emulated ARM train one model in one round."""

from collections import Counter

import pytest
from typer.testing import CliRunner

from coordinator.store.tasks import Secagg
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.bundle import Bundle
from muster.app import app
from simulator import datasets
from simulator.errors import BrowserMissing, FleetError, ProfileError
from simulator.fleet import browsers, fork_servers as fleet_node
from simulator.fleet.profile import Kind, counted_kinds
from tests.conformance.browser import served
from tests.device_runtime.pages import build
from tests.simulator.federation import SEED, rounding_error
from tests.simulator.test_arm import machine  # noqa: F401  # a fixture
from tests.simulator.test_keystone import RUNTIME, TOLERANCE

SECAGG = Secagg(clip_norm=4.0, max_examples=400)


@pytest.fixture
def mixed(tmp_path, federate):
    """One round of logistic regression on devices of several runtimes: its run, and the error that rounding allows."""

    def run(runtimes, secagg=None):
        try:
            browsers.programs()
        except BrowserMissing as error:
            pytest.skip(str(error))
        page = build(tmp_path / "page")
        kinds = counted_kinds(runtimes)
        goal = sum(int(kind.weight) for kind in kinds)
        users, _ = datasets.users("digits", None, goal)
        model, algorithm = Model(load("logreg", (1, 8, 8), 10), SEED), create("fedavg", {"batch_size": 5})
        round_of = {"rounds": 1, "goal": goal, "secagg": secagg}
        # On a busy machine a browser that loads its engine is silent for seconds.
        found = federate(model, algorithm, users, RUNTIME, kinds=kinds, page=page, silence_s=60.0, **round_of)
        assert found.reported == Counter({kind.name: int(kind.weight) for kind in kinds})
        layout = Bundle(tmp_path / "plan").plan.report
        error = rounding_error(secagg, layout, users.sizes.tolist()) / found.ways[-1] if secagg else TOLERANCE
        return found.difference, error

    return run


@pytest.mark.long
def test_devices_of_three_runtimes_sum_to_the_engines_model(mixed):
    # A sum that is off by one word fails its check word, and the round with it.
    difference, allowed = mixed("node:3,python:3,browser:2", SECAGG)
    assert TOLERANCE < difference < allowed < 1e-2


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("secagg", [None, SECAGG], ids=["plain", "secure"])
def test_devices_of_all_runtimes_train_the_engines_model(secagg, machine, mixed, capsys):  # noqa: F811
    difference, allowed = mixed("node:6,python:6,browser:4,aarch64:4", secagg)
    with capsys.disabled():
        print(f"\nPython, Node, browser and ARM: {difference:.1e} relative l2 from the engine, {allowed:.1e} allowed")
    assert difference < allowed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nod:1", "did you mean node?"),
        ("node", "as in node:8"),
        ("node:0", "as in node:8"),
        ("node:1,node:2", "comes once"),
    ],
)
def test_a_text_that_counts_no_runtimes_is_refused(text, words):
    with pytest.raises(ProfileError, match=words):
        counted_kinds(text)


@pytest.mark.parametrize("runtime", ["node", "browser"])
def test_devices_that_share_a_program_cannot_be_slowed_down_or_killed(runtime):
    with pytest.raises(ValueError, match="leave out silence"):
        Kind(name="a", runtime=runtime, silence=0.2)


@pytest.mark.parametrize(
    ("path", "node_program", "words"),
    [("", None, "there is none on the PATH"), ("", "#!/bin/sh\nexit 1\n", "older"), ("nowhere", None, "checkout")],
)
def test_a_fleet_says_what_devices_on_node_lack(tmp_path, monkeypatch, path, node_program, words):
    if node_program:
        (tmp_path / "node").write_text(node_program)
        (tmp_path / "node").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    if path:
        monkeypatch.setattr(fleet_node, "_FLEET", tmp_path / path)
    with pytest.raises(FleetError, match=words):
        fleet_node.fleet_command()


def test_a_fleet_says_what_devices_in_browsers_lack(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrowserMissing, match="apt-get install chromium chromium-driver"):
        browsers.command()


def test_a_coordinator_without_a_page_for_browsers_is_named(tmp_path):
    with served(tmp_path, tmp_path) as without_page:
        for url, words in (
            (without_page, "make page"),
            ("http://127.0.0.1:1", "no coordinator answers"),
            ("http://10.0.0.1:8080", "https"),
        ):
            with pytest.raises(FleetError, match=words):
                browsers.check_page(url)


def test_the_command_counts_devices_by_runtime(tmp_path):
    words = ["fleet", "run", "--coordinator", "http://127.0.0.1:1", "--population", "p", "--runtime", "node:2,python:1"]
    in_browsers = CliRunner().invoke(app, [*words[:-1], "browser:33"])
    assert "at most 32 devices of a fleet are in browsers, not 33" in str(in_browsers.exception)
    assert "leave this out" in CliRunner().invoke(app, [*words, "--devices", "9"]).output
    assert "names runtimes itself" in CliRunner().invoke(app, [*words, "--profile", str(tmp_path)]).output
