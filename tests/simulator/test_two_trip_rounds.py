"""The keystone for algorithms of two trips: rounds take the trips in turn, on a fleet over HTTP and in the engine."""

import itertools

import numpy as np
import pytest

from coordinator.rules.states import TaskState
from coordinator.store.tasks import Secagg, TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.bundle import Bundle
from fedcore.errors import InvalidSetting
from fedcore.schedule import ServerSchedule
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.private_training import Cohorts
from simulator.proofs import counted_cohort, worst_difference
from simulator.simulation import simulate, training_of
from tests.coordinator.fork_server import wait_until
from tests.simulator.federation import SEED, rounding_error
from tests.simulator.test_keystone import RUNTIME, TOLERANCE, tell

ROUNDS = 4


def made(model_name, algorithm_name, settings):
    return Model(load(model_name, (1, 8, 8), 10), SEED), create(algorithm_name, settings)


@pytest.mark.parametrize(
    ("model_name", "algorithm_name", "settings"),
    [
        ("logreg", "mime", {"optimizer": "adam", "client_lr": 0.01, "batch_size": 5}),
        pytest.param("digits_cnn", "mime", {"batch_size": 5, "epochs": 2}, marks=pytest.mark.long),
        pytest.param("mlp", "feddane", {"batch_size": 5, "mu": 0.1}, marks=pytest.mark.long),
        pytest.param("mlp", "fsvrg", {"batch_size": 4}, marks=pytest.mark.long),
        pytest.param("mlp", "dsvrg", {"steps": 7}, marks=pytest.mark.long),
    ],
)
def test_fleet_and_engine_agree_over_two_trips(model_name, algorithm_name, settings, federate, capsys):
    users, _ = datasets.users("digits", None, 12)
    run = federate(*made(model_name, algorithm_name, settings), users, RUNTIME, rounds=ROUNDS)
    tell(capsys, f"{model_name} {algorithm_name}", run.difference)
    assert [way > 0 for way in run.ways] == [False, True, True, True]
    assert run.ways[1] == run.ways[2]
    assert run.difference < TOLERANCE


@pytest.mark.long
def test_a_secure_fleet_agrees_over_two_trips_within_the_rounding(tmp_path, federate, capsys):
    users, _ = datasets.users("digits", None, 12)
    secagg = Secagg(clip_norm=4.0, max_examples=120)
    model, algorithm = made("logreg", "mime", {"batch_size": 5})
    run = federate(model, algorithm, users, RUNTIME, rounds=ROUNDS, secagg=secagg)
    # c carries its rounding into a mean delta by client_lr · (1 − β₁) · steps, which is less than 1.
    sizes = dict(zip(users.clients, users.sizes.tolist(), strict=True))
    plan, moved, allowed = Bundle(tmp_path / "plan").plan, 0.0, 0.0
    for number, (cohort, way) in enumerate(zip(run.cohorts, run.ways, strict=True), 1):
        moved += rounding_error(secagg, plan.of_round(number).report, [sizes[client] for client in cohort.values()])
        allowed = max(allowed, moved / way if way else 0.0)
    tell(capsys, f"mime under secure aggregation, {allowed:.1e} allowed", run.difference)
    assert TOLERANCE < run.difference < allowed < 1e-2


@pytest.mark.long
def test_a_fleet_of_same_cohorts_agrees_with_the_engine(tmp_path, coordinators, capsys):
    users, _ = datasets.users("digits", None, 14)
    model, algorithm = made("logreg", "feddane", {"batch_size": 5, "mu": 0.1})
    bundle = export_bundle(model, algorithm, tmp_path / "plan")
    settings = TaskSettings(
        population="p", goal=6, rounds=ROUNDS, over_selection=1.3, minimum=4, seed=SEED, same_cohort=True
    )
    with coordinators.local(tmp_path) as local:
        task = local.store.register_task(bundle, settings).id
        config = FleetConfig(coordinator=local.url, population="p", folder=tmp_path / "devices", concurrency=14)
        clients = Fleet(config, users).run().clients
        wait_until(lambda: local.store.task(task).state is TaskState.COMPLETED)
        numbers = range(1, local.store.task(task).settings.rounds + 1)
        cohorts = [counted_cohort(local.store, task, number, clients) for number in numbers]
        models = [local.store.checkpoint(task, number)["params"] for number in numbers]
    for first, second in zip(cohorts[::2], cohorts[1::2], strict=True):
        assert set(second.values()) <= set(first.values())
    found = worst_difference(Engine(model, algorithm, users, seed=SEED), users, cohorts, models)
    tell(capsys, "feddane with same cohorts", found)
    assert found < TOLERANCE


def test_a_pair_that_began_again_is_replayed(tmp_path):
    users, _ = datasets.users("digits", None, 6)
    parts, cohort = made("logreg", "feddane", {"batch_size": 5}), dict(enumerate(users.clients))
    fleet = Engine(*parts, users, seed=SEED)
    models = [fleet.state["params"]] * 2
    for number in (3, 4):
        fleet.run_round(number, range(6))
        models.append(fleet.state["params"])
    assert worst_difference(Engine(*parts, users, seed=SEED), users, [cohort, {}, cohort, cohort], models) == 0


def test_a_simulated_second_trip_has_the_clients_of_the_first():
    users, _ = datasets.users("digits", None, 12)
    schedule = ServerSchedule(double_every=1, largest_cohort=8)
    same, others = Cohorts(2, schedule, same=True), Cohorts(2, schedule)
    drawn = [same.draw(number, users, SEED) for number in range(1, 4)]
    assert drawn == [users.sample(2, SEED, 1), users.sample(2, SEED, 1), users.sample(8, SEED, 3)]
    assert others.draw(2, users, SEED) == users.sample(4, SEED, 2)
    assert [[cohorts.size(number) for number in (1, 2, 3)] for cohorts in (same, others)] == [[2, 2, 8], [2, 4, 8]]


def test_a_simulation_of_one_trip_refuses_the_same_cohort():
    with pytest.raises(InvalidSetting, match="same_cohort is for algorithms of two trips, and fedavg has one"):
        training_of(SimulationConfig(model="logreg", same_cohort=True))


def test_the_same_cohort_is_a_setting_of_a_simulation():
    parts = {"model": "logreg", "algorithm": "feddane", "settings": {"batch_size": 5, "mu": 0.1}, "rounds": 2}
    same, another = (simulate(SimulationConfig(**parts, cohort=3, same_cohort=asked)) for asked in (True, False))
    assert same.params_sha256 != another.params_sha256
    assert simulate(SimulationConfig(**parts, cohort=3, same_cohort=True)).params_sha256 == same.params_sha256


def test_the_engine_runs_one_trip_a_round():
    users, _ = datasets.users("digits", None, 6)
    engine = Engine(*made("logreg", "mime", {"batch_size": 5}), users, seed=SEED)
    states = [engine.state]
    for number in range(1, 5):
        engine.run_round(number, range(6))
        states.append(engine.state)
    moved = [
        {name for name in after if not np.array_equal(before[name], after[name])}
        for before, after in itertools.pairwise(states)
    ]
    assert moved == [{"gradient"}, {"params", "m"}] * 2


def test_passes_receive_the_carry_of_their_own_client_alone():
    # Clients whose numbers of steps differ: the longest go first, and the rows of the others are left out.
    users, _ = datasets.users("digits", None, 40)
    by_size = np.argsort(users.sizes)
    cohort = [*by_size[:2].tolist(), *by_size[-2:].tolist()]
    settings = {"batch_size": int(users.sizes.min()), "mu": 0.1}
    assert users.sizes.min() < users.sizes.max()
    together, alone = (
        Engine(*made("logreg", "feddane", settings), users, seed=SEED, computing=Computing(at_once=at_once))
        for at_once in (4, 1)
    )
    for number in (1, 2):
        for engine in (together, alone):
            engine.run_round(number, cohort)
    np.testing.assert_allclose(together.state["params"], alone.state["params"], rtol=1e-5, atol=1e-7)


def test_agreement_before_the_first_move_demands_equality():
    users, _ = datasets.users("digits", None, 6)
    cohort = dict(enumerate(users.clients))
    parts = made("logreg", "mime", {"batch_size": 5})
    start = Engine(*parts, users, seed=SEED).state["params"]
    assert worst_difference(Engine(*parts, users, seed=SEED), users, [cohort], [start]) == 0
    assert worst_difference(Engine(*parts, users, seed=SEED), users, [cohort], [start + np.float32(1e-9)]) > 0.1
