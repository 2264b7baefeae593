"""Real devices and a real coordinator, on a road with bad weather: the model is that of exactly the reports counted."""

import pytest

from coordinator.rules.states import RoundState
from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.proofs.fleet_against_engine import counted_cohort, worst_difference
from tests.acceptance.reconcile import reconcile
from tests.device_runtime.proxy import Weather, road_to

ALGORITHM, ROUNDS, DEVICES = {"batch_size": 5, "client_lr": 0.05}, 3, 5
STORM = {"cut_up": 0.06, "cut_down": 0.06, "flip_up": 0.04, "flip_down": 0.04, "twice": 0.1, "late": 0.1}


@pytest.mark.promise("Slow, cut, corrupt, repeated and reordered traffic changes no count")
def test_slow_cut_repeated_and_reordered_requests_change_no_count(coordinators, servers, tmp_path, capsys):
    users, _ = datasets.users("digits", None, DEVICES)
    model, algorithm = Model(load("logreg"), 0), create("fedavg", ALGORITHM)
    bundle = export_bundle(model, algorithm, tmp_path / "plan")
    settings = TaskSettings(
        population="p",
        goal=3,
        minimum=2,
        rounds=ROUNDS,
        over_selection=DEVICES / 3,
        selection_timeout_s=3.0,
        reporting_deadline_s=10.0,
        max_attempts=100,
    )
    with coordinators.local(tmp_path) as local, road_to(local.url) as road:
        store = local.store
        road.weather = Weather(1, latency_s=0.01, bytes_per_s=1e6, **STORM)
        task = store.register_task(bundle, settings).id
        config = FleetConfig(coordinator=road.url, population="p", folder=tmp_path / "devices", concurrency=DEVICES)
        summary = Fleet(config, users).run(servers=servers)
        numbers = [one.number for one in store.rounds(task) if one.state is RoundState.COMMITTED]
        cohorts = [counted_cohort(store, task, number, summary.clients) for number in numbers]
        models = [store.checkpoint(task, number)["params"] for number in numbers]
        found = reconcile(store, task, tmp_path / "devices", summary)
    with capsys.disabled():
        print(f"\nweather: {dict(road.weather.befell)}, {dict(summary.endings)}")
    assert numbers == list(range(1, ROUNDS + 1))
    assert not found.discrepancies
    assert worst_difference(Engine(model, algorithm, users, seed=0), users, cohorts, models) < 1e-5
    assert all(road.weather.befell[failure] for failure in STORM)
