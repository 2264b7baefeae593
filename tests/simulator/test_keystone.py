"""The keystone: one plan, the same data, cohorts, order and seeds, on a fleet over HTTP and in the engine.

If this holds, what a researcher sees in simulation is what a company gets on phones. Cohorts and slots are drawn by
seed, so that a run is the same each time: of as many cohorts as chance draws, one run of digits_cnn in a hundred meets
a kink of its max-pool, where round-off decides (docs/decisions/0009-smooth-reference-models.md).
"""

import random
from types import SimpleNamespace

import pytest

from coordinator.store.tasks import Secagg
from export.model import Model
from export.models import load
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.algorithm import trips_of
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.local_training import PartlyLocal
from fedcore.algorithms.question import QUESTION
from fedcore.bundle import Bundle
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.fork_servers import HERE
from simulator.proofs import worst_difference
from tests.coordinator.fork_server import SeededSource
from tests.sampled import sampled
from tests.simulator.federation import GOAL, ROUNDS, SEED, rounding_error

pytestmark = pytest.mark.promise("Fleet and simulator reach the same model")

TOLERANCE, RUNTIME = 1e-5, {"onnx": "onnxruntime"}
# Shards hold 23 or 24 digits: batches of 5 leave a masked last batch, batches of 4 leave none on shards of 24.
CASES = [
    ("logreg", "fedavg", {"batch_size": 5, "weighting": "uniform", "clip_norm": 0.3, "clip_quantile": 0.5}),
    ("logreg", "scaffold", {"batch_size": 5}),
    ("digits_cnn", "mimelite", {"batch_size": 5, "weighting": "examples"}),
    ("mlp", "fedadam", {"batch_size": 4, "epochs": 2}),
    ("digits_cnn", "fedavg", {"batch_size": 5, "epochs": 2}),
    ("digits_cnn", "fedadam", {"batch_size": 5}),
    ("digits_cnn", "mimelite", {"optimizer": "adam", "client_lr": 0.01, "batch_size": 7}),
    ("tests.export.models:digits_dropout", "fedavg", {"batch_size": 5, "epochs": 2}),
    ("tests.export.models:digits_adapted", "fedadam", {"batch_size": 5}),
    ("mlp", "scaffold", {"batch_size": 5, "option": "I"}),
    ("logreg", "feddyn", {"batch_size": 5}),
    ("logreg", "fedpd", {"batch_size": 5}),
    ("tests.export.models:digits_wide", "fedavg", {"batch_size": 5}),
]
EVERY = [
    ("mlp", name, {"batch_size": 5} if hasattr(one(), "batch_size") else {})
    for name, one in ALGORITHMS.items()
    if one.family not in {EVALUATION, QUESTION, PartlyLocal.family}
]


@pytest.mark.parametrize(("model_name", "algorithm_name", "settings"), sampled([*CASES, *EVERY], CASES[:2]))
def test_the_fleet_and_the_engine_reach_the_same_model(model_name, algorithm_name, settings, federate, capsys):
    users, _ = datasets.users("digits", None, 12)
    model = Model(load(model_name, (1, 8, 8), 10), SEED)
    algorithm = create(algorithm_name, settings)
    run = federate(model, algorithm, users, RUNTIME, rounds=ROUNDS * len(trips_of(algorithm)))
    tell(capsys, f"{model_name} {algorithm_name}", run.difference)
    assert run.difference < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_name", "algorithm_name", "settings"),
    [CASES[2], ("tests.export.models:digits_dropout", "mimelite", {"clip_norm": 1.0})],
)
def test_devices_with_different_runtimes_train_in_one_round(
    model_name, algorithm_name, settings, executorch, federate, capsys
):
    users, _ = datasets.users("digits", None, 12)
    model, algorithm = Model(load(model_name, (1, 8, 8), 10), SEED), create(algorithm_name, settings)
    backends = {"onnx": "onnxruntime", "executorch": "executorch"}
    run = federate(model, algorithm, users, backends)
    tell(capsys, f"{model_name} {algorithm_name} on both runtimes", run.difference)
    assert run.difference < TOLERANCE
    # Kinds alternate within a cohort: half of it runs ONNX Runtime, half ExecuTorch.
    assert run.reported == {f"{HERE} {backend}": GOAL // 2 * ROUNDS for backend in backends.values()}


@pytest.mark.long
def test_a_fleet_with_compressed_reports_reaches_the_engines_model(federate, capsys):
    users, _ = datasets.users("digits", None, 12)
    model, algorithm = Model(load("logreg", (1, 8, 8), 10), SEED), create("fedavg", {"batch_size": 5})
    run = federate(model, algorithm, users, RUNTIME, compress="low_rank=8,rotation,subsample=0.5,bits=4")
    tell(capsys, "compressed", run.difference)
    assert run.difference < TOLERANCE


@pytest.mark.long
def test_a_secure_fleet_with_compressed_reports_reaches_the_engines_model(tmp_path, federate, capsys):
    users, _ = datasets.users("digits", None, 12)
    model, algorithm = Model(load("logreg", (1, 8, 8), 10), SEED), create("fedavg", {"batch_size": 5})
    secagg = Secagg(clip_norm=4.0, bits=14, max_examples=120, group_size=16)
    run = federate(model, algorithm, users, RUNTIME, secagg=secagg, compress="rotation,subsample=0.25")
    sizes = dict(zip(users.clients, users.sizes.tolist(), strict=True))
    layout = Bundle(tmp_path / "plan").plan.report
    rounding = [rounding_error(secagg, layout, [sizes[one] for one in cohort.values()]) for cohort in run.cohorts]
    tell(capsys, "compressed, under secure aggregation", run.difference)
    assert TOLERANCE < run.difference < sum(rounding) / run.ways[-1] < 1e-2


@pytest.mark.parametrize(
    ("model_name", "goal"),
    sampled([("digits_cnn", 8), ("logreg", 18)], [("logreg", 18)]),
    ids=["one group", "two groups"],
)
def test_secure_fleet_reaches_the_engines_model_within_the_rounding(model_name, goal, tmp_path, federate, capsys):
    users, _ = datasets.users("digits", None, goal + 4)
    model, algorithm = Model(load(model_name, (1, 8, 8), 10), SEED), create("fedavg", {"batch_size": 5})
    secagg = Secagg(clip_norm=4.0, max_examples=120, group_size=16)
    run = federate(model, algorithm, users, RUNTIME, secagg=secagg, goal=goal)
    # FedAvg's next model is the mean, so the error of every round is its rounding, and training carries it along.
    moved, allowed = 0.0, []
    sizes = dict(zip(users.clients, users.sizes.tolist(), strict=True))
    layout = Bundle(tmp_path / "plan").plan.report
    for cohort, way in zip(run.cohorts, run.ways, strict=True):
        moved += rounding_error(secagg, layout, [sizes[client] for client in cohort.values()])
        allowed.append(moved / way)
    tell(capsys, f"under secure aggregation, {max(allowed):.1e} allowed", run.difference)
    assert TOLERANCE < run.difference < max(allowed) < 1e-2


def tell(capsys, what, difference):
    with capsys.disabled():
        print(f"\nkeystone {what}: {difference:.1e} relative l2 after {ROUNDS} rounds")


def test_a_seeded_draw_does_not_depend_on_who_came_first():
    waiting = [SimpleNamespace(device=f"{number:03}") for number in range(50)]
    mixed = random.Random(0).sample(waiting, 50)
    assert SeededSource(1).sample(waiting, 8) == SeededSource(1).sample(mixed, 8)
    assert SeededSource(1).sample(waiting, 8) != SeededSource(2).sample(waiting, 8)


def test_the_measure_of_agreement_sees_a_wrong_seed(tmp_path):
    users, _ = datasets.users("digits", None, 6)
    model, algorithm = Model(load("logreg")), create("fedavg", {"batch_size": 5})
    engine = Engine(model, algorithm, users, seed=1)
    engine.run_round(1, range(6))
    cohort = dict(enumerate(users.clients))
    fleet = [engine.state["params"]]
    assert worst_difference(Engine(model, algorithm, users, seed=1), users, [cohort], fleet) == 0
    assert worst_difference(Engine(model, algorithm, users, seed=2), users, [cohort], fleet) > 100 * TOLERANCE
