"""A fleet of very unequal speed in mode buffered: device processes, real HTTP, and a coordinator that is killed."""

import threading

import numpy as np
import pytest

from coordinator.rules.buffers import mean_staleness, staleness_weight
from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.rules.task_settings import Buffered
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.fork_servers import HERE, fork_servers
from simulator.fleet.profile import Kind
from tests.acceptance.reconcile import reconcile
from tests.coordinator.replicas import replicas_on, until

KINDS = (Kind(name="fast", weight=3), Kind(name="slow", slow_down=(3.0, 30.0)), Kind(name="stuck", slow_down=1e3))
SETTINGS = {"batch_size": 5, "client_lr": 0.01, "server_lr": 0.5}
LONG = [pytest.mark.long, pytest.mark.timeout(1200)]
EXAMPLES = 1500
"""What a device sees of examples in all its epochs: steps enough for the slowest to be at work for a minute."""
TOLERANCE = 1e-5
"""The bound of float32 round-off in the relative distance of two models, as in the keystone test."""


@pytest.mark.parametrize(("devices", "goal", "rounds"), [(10, 3, 5), pytest.param(200, 20, 40, marks=LONG)])
def test_buffers_wait_for_no_slow_device_and_outlive_a_kill(coordinators, tmp_path, capsys, devices, goal, rounds):
    users, _ = datasets.users("digits", None, devices)
    epochs = 1 + EXAMPLES * devices // int(users.sizes.sum())
    model, algorithm = Model(load("logreg")), create("fedbuff", SETTINGS | {"epochs": epochs})
    database = f"sqlite:///{tmp_path / 'muster.db'}"
    with (
        open_coordinator_store(database, tmp_path / "blobs") as store,
        replicas_on(coordinators, tmp_path, store, database) as replicas,
        fork_servers({HERE: ["onnxruntime"]}) as servers,
    ):
        mode = Buffered(concurrency=devices, max_staleness=rounds)
        settings = TaskSettings(population="p", goal=goal, rounds=rounds, buffered=mode)
        task = store.register_task(export_bundle(model, algorithm, tmp_path / "plan"), settings).id
        first = replicas.start(accept_unattested=True)
        config = FleetConfig(
            coordinator=first.url, population="p", folder=tmp_path / "devices", concurrency=devices, kinds=KINDS
        )
        summaries = []
        fleet = threading.Thread(target=lambda: summaries.append(Fleet(config, users).run(servers=servers)))
        fleet.start()

        def committed():
            return [one for one in store.rounds(task) if one.state is RoundState.COMMITTED]

        until(lambda: len(committed()) >= rounds // 2, 300)
        replicas.kill(first)
        replicas.start(port=int(first.url.rpartition(":")[2]), accept_unattested=True)
        until(lambda: store.task(task).state is TaskState.COMPLETED, 600)
        fleet.join(600)
        (summary,) = summaries
        done, attempts = committed(), store.rounds(task)
        agreement = worst_difference(Engine(model, algorithm, users), users, store, task, summary.clients)
        found = reconcile(store, task, tmp_path / "devices", summary)
        stuck = [seat for seat in store.cohort(task, 1) if seat.state is not AssignmentState.REPORTED]
    staleness = [sum(counts) for counts in zip(*(_padded(one.staleness, rounds) for one in done), strict=True)]
    with capsys.disabled():
        print(f"\nbuffered: {devices} devices, staleness {staleness}, {agreement:.1e} from the engine")
    assert [one.number for one in done] == list(range(1, rounds + 1))
    assert {one.reported for one in done} == {goal}
    assert {one.reason for one in attempts if one.state is RoundState.ABANDONED} <= {"driver-lost"}
    assert stuck  # the first version was committed, and all others, without them
    assert mean_staleness(staleness) > 0
    assert agreement < TOLERANCE
    assert found.discrepancies == ()


def worst_difference(engine, users, store, task, clients):
    """Replay every version from its rows; the largest difference from the fleet's model, relative to the whole way.

    A group of reports from one model moves that model by server_lr times their mean, under uniform weights.
    """
    states, worst = [engine.state], 0.0
    for number in range(1, store.task(task).settings.rounds + 1):
        seats = store.counted(task, number)
        moved = np.zeros_like(states[0]["params"], np.float64)
        for base in {seat.number for seat in seats}:
            group = [seat for seat in seats if seat.number == base]
            engine.restore(states[base - 1])
            cohort = [users.clients.index(clients[seat.device]) for seat in group]
            engine.run_round(base, cohort, [seat.slot for seat in group])
            step = engine.state["params"].astype(np.float64) - states[base - 1]["params"]
            moved += staleness_weight(number - base) * len(group) * step
        after = states[-1]["params"] + moved / len(seats)
        states.append({"params": after.astype(np.float32)})
        fleets = store.checkpoint(task, number)["params"].astype(np.float64)
        worst = max(worst, np.linalg.norm(after - fleets) / np.linalg.norm(fleets - states[0]["params"]))
    return worst


def _padded(counts, length):
    return [*counts, *[0] * (length - len(counts))]
