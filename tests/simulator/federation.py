"""The same cohorts, drawn by seed, on a fleet over HTTP and in the engine."""

import base64
import hashlib
import math
import sqlite3
from collections import Counter
from contextlib import closing
from typing import NamedTuple

import numpy as np
import safetensors.numpy

from coordinator.rules.states import TaskState
from coordinator.store.tasks import TaskSettings
from device_runtime.permission.policy import Policy
from device_runtime.state.folder import KeyFile, Sealer
from export.build import export_bundle
from fedcore.algorithms.rehearsal import moves_by_participation
from fedcore.compression import Compression
from fedcore.masking import fixed_point
from fedcore.release import SumBounds
from fedcore.signing import SigningKey
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.engines.graphs import graphs_of
from simulator.fleet.fleet import Fleet, FleetConfig, state_folder
from simulator.fleet.fork_servers import HERE, fork_servers
from simulator.fleet.profile import equal_kinds
from simulator.proofs import Cohort, counted_cohort, replay, worst_difference
from tests.coordinator.fork_server import wait_until

ROUNDS, GOAL, SEED = 3, 8, 11


class Run(NamedTuple):
    """What came of a fleet; `reported` counts reports by kind of device, `metrics` are those of every round."""

    difference: float
    ways: list[float]
    cohorts: list[Cohort]
    reported: Counter[str]
    metrics: list[dict[str, float]]


def federated(
    folder,
    coordinators,
    model,
    algorithm,
    users,
    backends,
    *,
    archs=(HERE,),
    kinds=None,
    rounds=ROUNDS,
    secagg=None,
    goal=GOAL,
    compress="",
    hold_out=None,
    page=None,
    silence_s=None,
    where="",
):
    """Rounds of seeded cohorts on a fleet whose files are in `folder`, and their distance from the engines' models.

    backends: the runtime for every format; devices of a cohort alternate in them, and in `archs`, unless `kinds` says
    what they are. hold_out: of the plan's examples. page: the folder of the page that the coordinator serves.
    silence_s: how long a device may be silent, if not as long as the coordinator would allow. where: the task's target.
    """
    compression = Compression.parse(compress)
    how = {"compression": compression, "hold_out": hold_out}
    bundle = export_bundle(model, algorithm, folder / "plan", targets=tuple(backends), **how)
    kinds = kinds or equal_kinds(archs, tuple(backends.values()))
    loaded = dict.fromkeys((kind.host for kind in kinds), tuple(backends.values()))
    served = {"page": str(page)} if page else {}
    with (
        coordinators.local(folder, SEED, silence_s=silence_s, secure=secagg is not None, **served) as local,
        fork_servers(loaded) as servers,
    ):
        task_settings = TaskSettings(
            population="p",
            goal=goal,
            rounds=rounds,
            over_selection=1.0,
            seed=SEED,
            secagg=secagg,
            where=where,
            clients=len(users) if moves_by_participation(algorithm) else None,
        )
        key = SigningKey.new(folder / "release.pem")
        task = local.create_task(bundle, task_settings, key).id
        config = FleetConfig(
            coordinator=local.url,
            population="p",
            folder=folder / "devices",
            concurrency=goal,
            sessions=goal,
            kinds=kinds,
            policy=Policy(signers=(key.signer,)) if secagg else None,
        )
        give_keys(config.folder, users)
        numbers = range(1, rounds + 1)
        clients, reported = {}, Counter()
        for number in numbers:
            # Devices that keep vectors come back once they can learn that their last round was committed.
            wait_until(lambda done=number - 1: sum(one.state.ended for one in local.store.rounds(task)) >= done)
            summary = Fleet(config, users.subset(users.sample(goal, SEED, number))).run(servers=servers)
            clients |= summary.clients
            reported += Counter({kind: endings["reported"] for kind, endings in summary.by_kind.items()})
        wait_until(lambda: local.store.task(task).state is TaskState.COMPLETED)  # the last receipt comes before that
        cohorts = [counted_cohort(local.store, task, number, clients) for number in numbers]
        metrics = [record.metrics for record in local.store.rounds(task)]
        files = [safetensors.numpy.load(local.store.model_file(task, number)) for number in numbers]
        fleet = [model.schema.flatten(tensors) for tensors in files]
    assert [len(cohort) for cohort in cohorts] == [goal] * rounds
    assert reported.total() == goal * rounds
    ways = [float(np.linalg.norm(params - model.initial)) for params in fleet]
    graphs = [graphs_of(bundle.plan, bundle.read)] if "onnx" in backends and not bundle.plan.kept else []
    users = users.training_on(bundle.plan.examples)
    engines = [
        Engine(model, algorithm, users, seed=SEED, computing=Computing(graphs=one), compression=compression)
        for one in (None, *graphs)
    ]
    difference = max(worst_difference(engine, users, cohorts, fleet) for engine in engines)
    return Run(difference, ways, cohorts, reported, metrics)


def give_node_key(folder, client):
    """The key that `give_keys` gives a client, for a device on Node."""
    with closing(sqlite3.connect(state_folder(folder, client) / "state.db")) as database, database:
        database.execute("CREATE TABLE kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")
        secret = base64.b64encode(hashlib.sha256(client.encode()).digest()).decode()
        database.execute("INSERT INTO kept VALUES ('key:device', ?)", (secret,))


def give_keys(folder, users):
    """Keys of devices by client, so that the coordinator knows every device by the same name in every run."""
    for client in users.clients:
        state = state_folder(folder, client)
        state.mkdir(parents=True)
        sealer = Sealer(KeyFile(state / "sealing-key"))
        (state / "device-key").write_bytes(sealer.seal("device-key", hashlib.sha256(client.encode()).digest()))


def rounding_error(secagg, layout, examples):
    """A bound on the l2 distance between the mean of reports under secure aggregation and the exact one, by rounding.

    It is the root of the worst expected square, for devices with these numbers of examples; over thousands of values it
    hardly varies. Clipping is not included. Codecs that shorten a segment increase the error of coded values in the
    same proportion. Source: docs/spec/wire.md §8.
    """
    w_max = secagg.max_examples if layout.weighting == "examples" else 1
    weights = [min(int(layout.weight(count)), w_max) for count in examples]
    bounds = SumBounds(clip_norm=secagg.clip_norm, bits=secagg.bits, max_examples=w_max, min_sum=1)
    points = [(segment, fixed_point(segment, bounds)) for segment in layout.unweighted if segment.normed]
    square = sum((segment.size * point.step) ** 2 / point.size for segment, point in points)
    return w_max * math.sqrt(len(weights) * square) / (2 * sum(weights))


def worst_figure(engine, users, cohorts, fleet_metrics):
    """The largest distance of a metric of a replayed round from the fleet's, relative for values above 1."""
    worst = 0.0
    for ours, after in zip(fleet_metrics, replay(engine, users, cohorts), strict=True):
        if not set(ours) <= set(after.metrics):
            return math.inf  # the engine lacks one
        apart = (abs(value - after.metrics[name]) / max(1.0, abs(value)) for name, value in ours.items())
        worst = max(worst, *apart)
    return worst
