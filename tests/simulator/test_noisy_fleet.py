"""Fleets under noise, and in buffered rounds."""

import math
import threading

import numpy as np
import pytest

from coordinator.rules.buffers import mean_staleness, staleness_weight
from coordinator.rules.private_sums import packed_segments
from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.rules.task_settings import Buffered
from coordinator.store.tasks import PrivacyBudget, Secagg, TaskSettings, open_coordinator_store
from device_runtime.permission.policy import Policy
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.compression import Compression
from fedcore.signing import SigningKey
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.fork_servers import HERE, fork_servers
from simulator.fleet.profile import Kind
from simulator.proofs import counted_cohort, replay
from tests.acceptance.reconcile import reconcile
from tests.coordinator.fork_server import wait_until
from tests.coordinator.replicas import replicas_on, until

DEVICES, SEED, CLIP, BITS = 8, 5, 1.0, 8
PROMISE = PrivacyBudget(
    mechanism="distributed", noise_multiplier=0.5, epsilon=100.0, delta=1e-6, users=DEVICES
)  # fmt: skip


def test_a_fleet_with_noise_differs_from_the_engine_by_that_noise(tmp_path, coordinators):
    users, _ = datasets.users("digits", None, DEVICES)
    model = Model(load("logreg", (1, 8, 8), 10), SEED)
    algorithm = create("fedavg", {"batch_size": 8, "weighting": "uniform", "clip_norm": CLIP})
    compression = Compression.parse("rotation")
    bundle = export_bundle(model, algorithm, tmp_path / "plan", compression=compression)
    secagg = Secagg(clip_norm=CLIP, bits=BITS)
    settings = TaskSettings(
        population="p", goal=DEVICES, rounds=1, over_selection=1.0, seed=SEED, secagg=secagg, privacy=PROMISE
    )  # fmt: skip
    key = SigningKey.new(tmp_path / "release.pem")
    policy = Policy(signers=(key.signer,), min_noise_multiplier=PROMISE.noise_multiplier)
    with coordinators.local(tmp_path, seed=SEED, secure=True) as local:
        task = local.create_task(bundle, settings, key).id
        config = FleetConfig(
            coordinator=local.url, population="p", folder=tmp_path / "devices", concurrency=DEVICES, sessions=DEVICES,
            policy=policy,
        )  # fmt: skip
        summary = Fleet(config, users).run()
        wait_until(lambda: local.store.task(task).state is TaskState.COMPLETED)
        cohort = counted_cohort(local.store, task, 1, summary.clients)
        fleet_D = local.store.checkpoint(task, 1)["params"]
        with local.store.database.reading() as records:
            [row] = records.ledger.entries(task)
    assert (row.mechanism, row.devices, row.clip) == ("distributed", DEVICES, CLIP)
    [(engine_D, _)] = replay(Engine(model, algorithm, users, seed=SEED, compression=compression), users, [cohort])
    [segment] = packed_segments(bundle.plan.report, settings.sum_bounds, DEVICES)
    # Of a value of the mean: noise, and rounding, whose variance is 0 to a quarter of a squared step.
    least, most = (DEVICES * (segment.noise + rounding) * segment.step**2 / DEVICES**2 for rounding in (0, 0.25))
    square, values = float(((fleet_D - engine_D) ** 2).sum()), fleet_D.size
    slack = 5 * math.sqrt(2 / values)
    assert least * (1 - slack) < square / values < most * (1 + slack)
    assert np.linalg.norm(engine_D - model.initial) > 0


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
