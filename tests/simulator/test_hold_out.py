"""The same devices and examples are held out in a fleet and in the engine."""

from dataclasses import replace

import numpy as np
import pytest

from coordinator.rules.progress import Reason
from coordinator.rules.states import TaskState
from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.batching import HoldOut, is_held_out
from fedcore.plan import ExampleSpec
from fedcore.signing import SigningKey
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.engine import Engine
from simulator.errors import DatasetError, EngineError
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.fork_servers import HERE
from simulator.fleet.profile import equal_kinds
from simulator.planned import completed_by_plan
from simulator.proofs import counted_cohort, worst_difference
from simulator.simulation import simulate
from tests.coordinator.fork_server import wait_until
from tests.sampled import sampled
from tests.simulator.federation import SEED, give_keys

SIDES = [HoldOut(0.3), HoldOut(0.3, "held-out")]
TOLERANCE, RUNTIME = 1e-5, {"onnx": "onnxruntime"}


def logreg():
    return Model(load("logreg", (1, 8, 8), 10), SEED), create("fedavg", {"batch_size": 5, "weighting": "examples"})


def spec(share, side="train"):
    return ExampleSpec(logreg()[0].spec.fields, hold_out=HoldOut(share, side))


@pytest.fixture(scope="module")
def users():
    return datasets.users("digits", None, 12)[0]


@pytest.mark.parametrize("hold_out", sampled(SIDES, SIDES[:1]), ids=lambda one: one.side)
def test_fleet_and_engine_train_on_the_same_examples(hold_out, users, federate):
    run = federate(*logreg(), users, RUNTIME, hold_out=hold_out)
    assert run.difference < TOLERANCE


def test_the_comparison_sees_an_example_too_many(users):
    model, algorithm = logreg()
    cohort, left = dict(enumerate(users.clients)), users.training_on(spec(0.05))
    engine = Engine(model, algorithm, left, seed=SEED)
    engine.run_round(1, range(12))
    fleet = [engine.state["params"]]
    assert worst_difference(Engine(model, algorithm, left, seed=SEED), left, [cohort], fleet) == 0
    assert worst_difference(Engine(model, algorithm, users, seed=SEED), users, [cohort], fleet) > 100 * TOLERANCE


def test_held_out_devices_train_in_no_round_and_measure_alone(users, tmp_path, coordinators, servers):
    model, algorithm = logreg()
    bundle, key = export_bundle(model, algorithm, tmp_path / "plan"), SigningKey.new(tmp_path / "key.pem")
    with coordinators.local(tmp_path, SEED) as local:
        config = FleetConfig(
            coordinator=local.url, population="p", folder=tmp_path / "devices", concurrency=12,
            kinds=equal_kinds((HERE,), ("onnxruntime",)),
        )  # fmt: skip
        give_keys(config.folder, users)
        settings = TaskSettings(population="p", goal=5, rounds=2, over_selection=1.0, seed=SEED, hold_out_devices=0.4)
        apart = replace(settings, goal=2, hold_out_devices=0.3, on_held_out=True)
        tasks = [local.create_task(bundle, one, key).id for one in (settings, apart)]
        wait_until(lambda: all(one.reason is Reason.SELECTING for one in local.store.progress()))
        clients = Fleet(config, users).run(servers=servers).clients
        wait_until(lambda: all(task.state is TaskState.COMPLETED for task in local.store.tasks()))
        drawn = []
        for task in tasks:
            cohorts = [counted_cohort(local.store, task, number, clients) for number in (1, 2)]
            models = [local.store.checkpoint(task, number)["params"] for number in (1, 2)]
            assert worst_difference(Engine(model, algorithm, users, seed=SEED), users, cohorts, models) < TOLERANCE
            drawn.append({client for cohort in cohorts for client in cohort.values()})
    held_out = {client for device, client in clients.items() if is_held_out("p", device, 0.4)}
    assert (len(clients), len(held_out)) == (12, 5)
    assert drawn[0].isdisjoint(held_out)
    assert drawn[1] < held_out


def test_a_population_keeps_what_the_rule_keeps_of_each_client(users):
    left = users.training_on(spec(0.5))
    assert left.clients == users.clients
    for client in range(12):
        shard = users.shard(client)
        kept = spec(0.5).kept(shard)
        for name, column in left.shard(client).items():
            np.testing.assert_array_equal(column, shard[name][kept])
    assert users.training_on(ExampleSpec(spec(0.5).fields)) is users
    assert left.classes == users.classes


def test_clients_without_an_example_left_do_not_train(users):
    few = users.training_on(spec(0.01, "held-out"))
    assert 0 < len(few) < 12
    assert few.sizes.min() == 1
    with pytest.raises(DatasetError, match="no example is left of a share of 1e-09, held-out"):
        users.training_on(spec(1e-9, "held-out"))


def test_a_simulation_holds_out_examples_of_those_who_train():
    given = {"model": "logreg", "rounds": 2, "cohort": 4, "clients": 20, "processes": 1}
    every, train, held_out = (
        simulate(SimulationConfig(**given, **more))
        for more in ({}, {"hold_out_examples": 0.25}, {"hold_out_examples": 0.25, "on_held_out_examples": True})
    )
    assert len({one.params_sha256 for one in (every, train, held_out)}) == 3
    assert every.test_users == train.test_users == held_out.test_users


def test_a_simulation_of_a_plan_runs_on_the_plans_side(tmp_path):
    bundle = export_bundle(*logreg(), tmp_path / "plan", hold_out=HoldOut(0.25, "held-out"))
    made = completed_by_plan({"plan": bundle.folder})
    assert (made["hold_out_examples"], made["on_held_out_examples"]) == (0.25, True)
    with pytest.raises(EngineError, match=r"hold_out_examples is 0.25 in .*, not 0.5; leave the option out"):
        completed_by_plan({"plan": bundle.folder, "hold_out_examples": 0.5})
    given = {"rounds": 1, "cohort": 4, "clients": 20, "processes": 1, "seed": SEED}
    planned = simulate(SimulationConfig(**made, **given))
    named = {name: value for name, value in made.items() if name != "plan"}
    alike = simulate(SimulationConfig(**named, **given, engine="graphs"))
    assert planned.params_sha256 == alike.params_sha256


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hold_out_examples": 1.0}, "hold_out_examples must be a number, at least 0 and below 1, not 1"),
        ({"hold_out_examples": -0.1}, "hold_out_examples must be a number, at least 0 and below 1, not -0.1"),
        ({"on_held_out_examples": True}, "on_held_out_examples needs hold_out_examples"),
        ({"hold_out_examples": 0.1, "baseline": "local"}, "hold_out_examples is for federated training, not .* local"),
    ],
)
def test_a_hold_out_that_cannot_be_simulated_is_refused(given, words):
    with pytest.raises(EngineError, match=words):
        SimulationConfig(model="logreg", **given)
