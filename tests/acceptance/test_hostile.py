"""A fleet that means ill: rounds are won all the same, and every account of what happened agrees."""

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.rules.states import AssignmentState
from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.signing import SigningKey
from muster.local.fleet import difference_from_engine, local_fleet
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig, state_folder
from simulator.fleet.profile import Kind, load_profile
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
    endings = summary.endings
    with capsys.disabled():
        print(f"\nhostile: {dict(endings)}, {agreement:.1e} from the engine")
    assert numbers == list(range(1, rounds + 1))
    assert accounts.discrepancies == ()
    assert agreement < TOLERANCE  # a report that was counted twice, or not at all, would move the model
    assert accounts.journalled == endings.total() == summary.sessions.total()
    assert accounts.accepted >= accounts.receipts >= rounds * goal // 2
    assert endings["silent"] + endings["killed"] >= 1
    assert set(summary.by_kind) == {"fast", "slow"}


@pytest.fixture(scope="module")
def world(tmp_path_factory, coordinators, bundle, servers):
    """A fleet that did its work, one of four devices always killed: store and task, folder, summary."""
    folder = tmp_path_factory.mktemp("audited")
    users, _ = datasets.users("digits", None, 4)
    with coordinators.local(folder) as local:
        settings = TaskSettings(
            population="p", goal=3, minimum=1, rounds=2, over_selection=4 / 3, selection_timeout_s=20.0
        )
        task = local.store.register_task(bundle, settings).id
        kinds = (Kind(name="well", weight=3), Kind(name="doomed", drop_out=1.0))
        config = FleetConfig(
            coordinator=local.url, population="p", folder=folder / "devices", concurrency=4, kinds=kinds
        )
        summary = Fleet(config, users).run(servers=servers)
        yield local.store, task, folder, summary


def found(world, summary=None):
    store, task, folder, own = world
    return reconcile(store, task, folder / "devices", summary or own).discrepancies


def test_accounts_with_killed_sessions_have_no_discrepancies(world):
    assert world[3].by_kind["doomed"]["killed"] >= 1
    assert found(world) == ()


def test_a_session_that_is_in_no_journal_is_found(world):
    summary = world[3]
    client = next(iter(summary.sessions))
    more = replace(summary, sessions=summary.sessions + Counter([client]))
    (words,) = found(world, more)
    assert words == f"{client}: {summary.sessions[client] + 1} sessions, {summary.sessions[client]} in its journal"


@pytest.mark.parametrize("false", ["count", "device", "state", "receipt", "assignment"])
def test_a_row_or_a_journal_that_says_something_false_is_found(world, false):
    store, task, folder, summary = world
    first, second, *others = [seat for seat in store.cohort(task, 1) if seat.report_sha256]
    count, client = 2 + len(others), summary.clients[first.device]
    place, receipts = "round 1, attempt 1", f"{client}: 1 receipts for assignment"
    row = f"UPDATE assignments SET {false} = '{{}}' WHERE id = '{second.id}'"
    entry = (
        f"UPDATE journal SET entry = json_set(entry, '$.{false}', '{{}}') WHERE json_extract(entry, '$.{{}}') = '{{}}'"
    )
    sql, old, new, words = {
        "count": (
            "UPDATE rounds SET reported = {} WHERE number = 1",
            count,
            count + 1,
            f"{place}: {count + 1} reports",
        ),
        "device": (row, second.device, first.device, f"{place}: 2 reports of device {first.device}"),
        "state": (row, AssignmentState.REPORTED, AssignmentState.EXPIRED, "other assignments are reported than"),
        "receipt": (entry.format("{}", "assignment", first.id), first.report_sha256, "other", receipts),
        "assignment": (entry.format("{}", "receipt", first.report_sha256), first.id, "other", receipts),
    }[false]
    path = state_folder(folder / "devices", client) / "state.db" if words == receipts else folder / "muster.db"
    change(path, sql.format(new))
    said = found(world)
    change(path, sql.format(old))
    assert any(one.startswith(words) for one in said)
    assert found(world) == ()


def change(path, sql):
    with closing(sqlite3.connect(path)) as database, database:
        assert database.execute(sql).rowcount == 1
