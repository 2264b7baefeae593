"""A fleet that means ill: rounds are won all the same, and every account of what happened agrees."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.signing import SigningKey
from muster.local.fleet import difference_from_engine, local_fleet
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.profile import load_profile
from tests.acceptance.reconcile import reconcile

LONG = [pytest.mark.long, pytest.mark.timeout(1200)]
PROFILE = Path(__file__).parents[2] / "examples" / "fleet-hostile.toml"
TOLERANCE = 1e-5
"""The bound of float32 round-off in the relative distance of two models, as in the keystone test."""


@pytest.mark.parametrize(("devices", "rounds"), [(16, 4), pytest.param(40, 20, marks=LONG)])
def test_silent_killed_and_unplugged_devices_do_not_stop_a_task(coordinators, tmp_path, capsys, devices, rounds):
    users, _ = datasets.users("digits", None, devices)
    goal = devices // 4
    settings = TaskSettings(
        population="hostile", goal=goal, minimum=goal // 2, rounds=rounds, over_selection=2.0,
        selection_timeout_s=10.0, reporting_deadline_s=10.0,
    )  # fmt: skip
    model, algorithm = Model(load("logreg")), create("fedavg", {"batch_size": 5, "epochs": 2, "client_lr": 0.05})
    bundle, key = export_bundle(model, algorithm, tmp_path / "plan"), SigningKey.new(tmp_path / "release.pem")
    with coordinators.local(tmp_path / "coordinator") as local:
        task = local.create_task(bundle, settings, key).id
        fleet = local_fleet(local, settings, users, key, tmp_path / "devices", kinds=load_profile(PROFILE))
        summary = fleet.run()
        numbers = [record.number for record in local.committed(task)]
        agreement = difference_from_engine(local, task, summary, Engine(model, algorithm, users), users, numbers)
        accounts = reconcile(local.store, task, tmp_path / "devices" / "hostile", summary)
        with closing(sqlite3.connect(tmp_path / "coordinator" / "muster.db")) as database, database:
            database.execute("UPDATE rounds SET reported = reported + 1 WHERE state = 'committed'")
        false = reconcile(local.store, task, tmp_path / "devices" / "hostile", summary)
    endings = summary.endings
    with capsys.disabled():
        print(f"\nhostile: {dict(endings)}, {agreement:.1e} from the engine")
    assert numbers == list(range(1, rounds + 1))
    assert accounts.discrepancies == ()
    assert len(false.discrepancies) == rounds  # the comparison can fail
    assert agreement < TOLERANCE  # a report that was counted twice, or not at all, would move the model
    assert accounts.journalled == endings.total() == summary.sessions.total()
    assert accounts.accepted >= accounts.receipts >= rounds * goal // 2
    assert endings["silent"] + endings["killed"] >= 1
    assert set(summary.by_kind) == {"fast", "slow"}
