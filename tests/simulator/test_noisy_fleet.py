"""A fleet whose devices add the noise: its model is the engine's, moved by the noise that the release promises."""

import math

import numpy as np

from coordinator.rules.private_sums import packed_segments
from coordinator.rules.states import TaskState
from coordinator.store.tasks import PrivacyBudget, Secagg, TaskSettings
from device_runtime.permission.policy import Policy
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.codecs.compression import Compression
from fedcore.signing import SigningKey
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.proofs.fleet_against_engine import counted_cohort, replay
from tests.coordinator.fork_server import wait_until

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
