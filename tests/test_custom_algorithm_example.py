"""`examples/custom_algorithm.py`: an algorithm of one's own, short, within the contract, and the same on a fleet."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcore.algorithms import create
from fedcore.algorithms.check import check

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    algorithm = create("custom_algorithm:FedAgree", {"client_lr": 0.1}, ["custom_algorithm"])
    return algorithm, sys.modules["custom_algorithm"]


def test_the_algorithm_is_short_and_keeps_the_contract(example):
    algorithm, _ = example
    check(algorithm)
    assert len(inspect.getsource(type(algorithm)).splitlines()) < 40


def test_parameters_on_which_devices_agree_move_as_in_fedavg(example):
    algorithm, module = example
    fast, slow = module.by_hand(algorithm, 10)["params"][:2], module.by_hand(algorithm, 10)["params"][2]
    np.testing.assert_allclose(fast, np.array([1.0, -2.0]) * (1 - 0.9**10), rtol=1e-9)
    assert 0 < slow < 1 - 0.9**10
    np.testing.assert_allclose(module.by_hand(algorithm, 150)["params"][:2], [1, -2], rtol=1e-4)


def test_a_coordinator_that_imports_the_example_loads_no_torch():
    program = "import sys; sys.modules['torch'] = None; import custom_algorithm"
    paths = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": paths})


@pytest.mark.long
def test_the_example_ends_with_the_engines_model_on_eight_devices():
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, str(EXAMPLES / "custom_algorithm.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    hand, accuracy, fleet = done.stdout.splitlines()
    assert hand.startswith("by hand: [")
    assert float(accuracy.rpartition(" ")[2]) > 0.85
    assert float(fleet.split()[3]) < 1e-5
