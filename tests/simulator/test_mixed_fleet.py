"""Mixed fleets: devices in Python, in TypeScript on Node and on emulated ARM train one model in one round."""

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
from simulator.errors import FleetError, ProfileError
from simulator.fleet import node as fleet_node
from simulator.fleet.profile import Kind, counted_kinds
from simulator.proofs.fleet_against_engine import rounding_error
from tests.device_runtime.node import node
from tests.simulator.federation import SEED
from tests.simulator.test_arm import machine  # noqa: F401  # a fixture
from tests.simulator.test_keystone import RUNTIME, TOLERANCE

SECAGG = Secagg(clip_norm=4.0, max_examples=400)


@pytest.fixture
def mixed(tmp_path, federate):
    """One round of logistic regression on devices of several runtimes: its run, and the error that rounding allows."""

    def run(runtimes, secagg=None):
        node()
        kinds = counted_kinds(runtimes)
        goal = sum(int(kind.weight) for kind in kinds)
        users, _ = datasets.users("digits", None, goal)
        model, algorithm = Model(load("logreg", (1, 8, 8), 10), SEED), create("fedavg", {"batch_size": 5})
        found = federate(model, algorithm, users, RUNTIME, kinds=kinds, rounds=1, goal=goal, secagg=secagg)
        assert found.reported == Counter({kind.name: int(kind.weight) for kind in kinds})
        layout = Bundle(tmp_path / "plan").plan.report
        error = rounding_error(secagg, layout, users.sizes.tolist()) / found.ways[-1] if secagg else TOLERANCE
        return found.difference, error

    return run


def test_python_and_node_devices_sum_securely_to_the_engines_model(mixed):
    # A sum that is off by one word fails its check word, and the round with it.
    difference, allowed = mixed("node:4,python:4", SECAGG)
    assert TOLERANCE < difference < allowed < 1e-2


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("secagg", [None, SECAGG], ids=["plain", "secure"])
def test_python_node_and_arm_devices_train_the_engines_model(secagg, machine, mixed, capsys):  # noqa: F811
    difference, allowed = mixed("node:8,python:8,aarch64:4", secagg)
    with capsys.disabled():
        print(f"\nPython, Node and ARM: {difference:.1e} relative l2 from the engine, {allowed:.1e} allowed")
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


def test_devices_on_node_cannot_be_slowed_down_or_killed():
    with pytest.raises(ValueError, match="leave out silence"):
        Kind(name="a", runtime="node", silence=0.2)


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


def test_the_command_counts_devices_by_runtime(tmp_path):
    words = ["fleet", "run", "--coordinator", "http://127.0.0.1:1", "--population", "p", "--runtime", "node:2,python:1"]
    assert "leave this out" in CliRunner().invoke(app, [*words, "--devices", "9"]).output
    assert "names runtimes itself" in CliRunner().invoke(app, [*words, "--profile", str(tmp_path)]).output
