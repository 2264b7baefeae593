"""`examples/fed_avg.py` computes what the engine computes, and it learns."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from export.model import Model
from export.models import load
from fedcore.algorithms import create
from simulator import datasets
from simulator.engine import Engine
from simulator.population import Population

EXAMPLE = Path(__file__).parents[1] / "examples" / "fed_avg.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("fed_avg_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "mimelite"])
def test_the_readable_round_gives_the_engines_model(example, name):
    model, whole = Model(load("logreg")), datasets.load("digits")
    # Devices of unlike size, so that weights matter.
    shards = [{key: array[: 3 + 2 * client] for key, array in whole.shard(client).items()} for client in range(10)]
    population = Population.of(whole.clients[:10], shards)
    algorithm = create(name, {"epochs": 2, "batch_size": 7})
    engine = Engine(model, algorithm, population, seed=0)
    state = algorithm.init(model.initial.astype(np.float64))
    for number, cohort in enumerate([[3, 1, 4], [1, 5, 9, 2]], start=1):
        engine.run_round(number, cohort)
        examples = [(shards[client]["x"].reshape(-1, 64).astype(np.float64), shards[client]["y"]) for client in cohort]
        state = example.federated_round(algorithm, state, examples, number)
    moved = np.linalg.norm(state["params"] - model.initial)
    assert moved > 0.01
    assert np.linalg.norm(engine.state["params"] - state["params"]) < 1e-4 * moved


def test_the_example_runs_with_fedcore_and_numpy_only_and_learns():
    blocked = ["torch", "simulator", "export", "coordinator", "device_runtime", "secagg"]
    program = "import runpy, sys; sys.modules.update(dict.fromkeys(sys.argv[2:])); "
    program += "runpy.run_path(sys.argv[1], {}, '__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program, EXAMPLE, *blocked], capture_output=True, text=True, check=True, timeout=60
    )
    last = done.stdout.splitlines()[-1]
    assert last.startswith("round 20: accuracy ")
    assert float(last.rpartition(" ")[2]) > 0.85
