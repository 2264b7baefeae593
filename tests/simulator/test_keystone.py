"""The keystone: one plan, the same data, cohorts, order and seeds, on a fleet over HTTP and in the engine.

If this holds, what a researcher sees in simulation is what a company gets on phones.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

from coordinator.store.tasks import Secagg, TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.bundle import Bundle
from muster.server import local_coordinator
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.fork_servers import HERE
from simulator.fleet.profile import take_turns
from simulator.proofs.replay import Cohort, counted_cohort, rounding, worst_difference

ROUNDS, TOLERANCE, SEED = 3, 1e-5, 11
# Shards hold 23 or 24 digits: batches of 5 leave a masked last batch, batches of 4 leave none on shards of 24.
CASES = [
    ("logreg", "fedavg", {"batch_size": 5, "weighting": "uniform"}),
    ("mlp", "fedadam", {"batch_size": 4, "epochs": 2}),
    pytest.param("digits_cnn", "fedavg", {"batch_size": 5, "epochs": 2}, marks=pytest.mark.long),
    pytest.param("digits_cnn", "fedadam", {"batch_size": 5}, marks=pytest.mark.long),
    ("digits_cnn", "mimelite", {"batch_size": 5, "weighting": "examples"}),
    pytest.param(
        "digits_cnn", "mimelite", {"optimizer": "adam", "client_lr": 0.01, "batch_size": 7}, marks=pytest.mark.long
    ),
    ("tests.export.models:digits_dropout", "fedavg", {"batch_size": 5, "epochs": 2}),
]


@pytest.mark.parametrize(("model_name", "algorithm_name", "settings"), CASES)
def test_the_fleet_and_the_engine_reach_the_same_model(model_name, algorithm_name, settings, tmp_path, capsys):
    users, _ = datasets.users("digits", None, 12)
    model = Model(load(model_name, (1, 8, 8), 10), SEED)
    algorithm = create(algorithm_name, settings)
    run = twice_at_most(lambda folder: federate(model, algorithm, users, {"onnx": "onnxruntime"}, folder), tmp_path)
    tell(capsys, f"{model_name} {algorithm_name}", run.difference)
    assert run.difference < TOLERANCE


@pytest.mark.parametrize(
    ("model_name", "algorithm_name", "settings"), [CASES[4], ("tests.export.models:digits_dropout", "mimelite", {})]
)
def test_devices_with_different_runtimes_train_in_one_round(
    model_name, algorithm_name, settings, tmp_path, capsys, executorch
):
    users, _ = datasets.users("digits", None, 12)
    model, algorithm = Model(load(model_name, (1, 8, 8), 10), SEED), create(algorithm_name, settings)
    backends = {"onnx": "onnxruntime", "executorch": "executorch"}
    run = twice_at_most(lambda folder: federate(model, algorithm, users, backends, folder), tmp_path)
    tell(capsys, f"{model_name} {algorithm_name} on both runtimes", run.difference)
    assert run.difference < TOLERANCE
    # Devices take turns in the order of the population: even ones run ONNX Runtime, odd ones ExecuTorch.
    for cohort in run.cohorts:
        assert {users.clients.index(client) % 2 for client in cohort.values()} == {0, 1}


@pytest.mark.parametrize(("model_name", "goal"), [("digits_cnn", 8), ("logreg", 18)], ids=["one group", "two groups"])
def test_a_fleet_under_secure_aggregation_reaches_the_engines_model_within_the_rounding(
    model_name, goal, tmp_path, capsys
):
    users, _ = datasets.users("digits", None, goal + 4)
    model, algorithm = Model(load(model_name, (1, 8, 8), 10), SEED), create("fedavg", {"batch_size": 5})
    secagg = Secagg(clip_norm=4.0, max_examples=120, group_size=16)
    run = federate(model, algorithm, users, {"onnx": "onnxruntime"}, tmp_path, secagg=secagg, goal=goal)
    # FedAvg's next model is the mean, so the error of every round is its rounding, and training carries it along.
    moved, allowed = 0.0, []
    sizes = dict(zip(users.clients, users.sizes.tolist(), strict=True))
    layout = Bundle(tmp_path / "plan").plan.report
    for cohort, way in zip(run.cohorts, run.ways, strict=True):
        moved += rounding(secagg, layout, [sizes[client] for client in cohort.values()])
        allowed.append(moved / way)
    tell(capsys, f"under secure aggregation, {max(allowed):.1e} allowed", run.difference)
    assert TOLERANCE < run.difference < max(allowed) < 1e-2


def twice_at_most(federate_in, folder):
    """A run; another one when it strays.

    One run of digits_cnn in a hundred, of as many cohorts as chance draws, meets a kink of its max-pool, where
    round-off decides (docs/decisions/0009). Two in a row do not.
    """
    run = federate_in(folder / "first")
    return run if run.difference < TOLERANCE else federate_in(folder / "second")


class Run(NamedTuple):
    difference: float
    ways: list[float]
    cohorts: list[Cohort]
    by: dict[str, Counter[str]]


def tell(capsys, what, difference):
    with capsys.disabled():
        print(f"\nkeystone {what}: {difference:.1e} relative l2 after {ROUNDS} rounds")


def federate(model, algorithm, users, backends, tmp_path, *, archs=(HERE,), rounds=ROUNDS, secagg=None, goal=8):
    """Rounds of as many devices, which take turns in the backends, and their distance from the engine's model."""
    bundle = export_bundle(model, algorithm, tmp_path / "plan", targets=tuple(backends))
    with local_coordinator(tmp_path) as local:
        task_settings = TaskSettings(
            population="p", goal=goal, rounds=rounds, over_selection=1.0, seed=SEED, secagg=secagg
        )
        task = local.store.register_task(bundle, task_settings).id
        config = FleetConfig(
            coordinator=local.url,
            population="p",
            folder=tmp_path / "devices",
            concurrency=goal,
            kinds=take_turns(archs, tuple(backends.values())),
        )
        summary = Fleet(config, users).run()
        numbers = range(1, rounds + 1)
        cohorts = [counted_cohort(local.store, task, number, summary.clients) for number in numbers]
        fleet = [local.store.checkpoint(task, number)["params"] for number in numbers]
    assert [len(cohort) for cohort in cohorts] == [goal] * rounds
    assert summary.endings["reported"] == goal * rounds
    engine = Engine(model, algorithm, users, seed=SEED)
    ways = [float(np.linalg.norm(params - engine.state["params"])) for params in fleet]
    difference = worst_difference(engine, users, cohorts, fleet)
    return Run(difference, ways, cohorts, summary.by)


def test_the_measure_of_agreement_sees_a_wrong_seed(tmp_path):
    users, _ = datasets.users("digits", None, 6)
    model, algorithm = Model(load("logreg")), create("fedavg", {"batch_size": 5})
    engine = Engine(model, algorithm, users, seed=1)
    engine.run_round(1, range(6))
    cohort = dict(enumerate(users.clients))
    fleet = [engine.state["params"]]
    assert worst_difference(Engine(model, algorithm, users, seed=1), users, [cohort], fleet) == 0
    assert worst_difference(Engine(model, algorithm, users, seed=2), users, [cohort], fleet) > 100 * TOLERANCE
