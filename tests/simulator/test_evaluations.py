"""Evaluations in the engine and on a fleet: the same figures, and those of every user's own measurements."""

import hashlib
from itertools import product

import numpy as np
import pytest
import safetensors.numpy
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.rules.entities import Regularly
from coordinator.rules.states import TaskState
from coordinator.store.tasks import Secagg, TaskSettings
from device_runtime.permission.policy import Policy
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.batching import is_held_out
from fedcore.signing import SigningKey, key_text
from fedcore.wire.signatures import device_id
from muster.creating import Evaluated, starting_from
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.engine import Engine, evaluate
from simulator.engines.computing import Computing
from simulator.engines.graphs import export_graphs
from simulator.errors import EngineError
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.fork_servers import fork_servers
from simulator.fleet.profile import assign_kinds, counted_kinds
from simulator.proofs import counted_cohort
from simulator.simulation import simulate, training_of
from tests.coordinator.fork_server import wait_until
from tests.device_runtime.node import node
from tests.sampled import sampled
from tests.simulator.federation import SEED, give_keys, give_node_key, worst_figure
from tests.simulator.test_engine import uneven

EVALUATIONS = ("evaluate", "compare", "personalisation")
AGREE = 1e-6
OF_LOSS = 10 * AGREE  # the ends of its intervals: what float32 leaves of differences of squares, of a range of 10


def ends(figures):
    return {name: value for name, value in figures.items() if name.endswith((".low", ".high"))}


def others(figures):
    return {name: value for name, value in figures.items() if not name.endswith((".low", ".high"))}


@pytest.mark.parametrize(
    ("model_name", "name"),
    sampled(
        product(["logreg", "tests.export.models:digits_dropout"], EVALUATIONS),
        [("logreg", "personalisation")],
    ),
)
def test_every_way_to_train_clients_gives_the_same_figures(model_name, name):
    population, model, algorithm = uneven(), Model(load(model_name, (1, 8, 8), 10)), create(name, {"batch_size": 5})
    ways = [
        Computing(),
        Computing(at_once=1),
        Computing(processes=2),
        Computing(graphs=export_graphs(model, algorithm)),
    ]
    found = []
    for way in ways:
        engine = Engine(model, algorithm, population, seed=7, computing=way)
        found.append([engine.run_round(number, [0, 1, 2, 3]).metrics for number in (1, 2)])
    for rounds in found[1:]:
        for expected, one in zip(found[0], rounds, strict=True):
            assert ends(one) == pytest.approx(ends(expected), abs=OF_LOSS, rel=0)
            assert others(one) == pytest.approx(others(expected), abs=AGREE, rel=AGREE)
    assert len(found[0][0]) > 10


def test_figures_are_those_of_every_users_own_measurements():
    users, _ = datasets.users("digits", None, 30)
    model = Model(load("logreg", (1, 8, 8), 10))
    figures = Engine(model, create("evaluate"), users).run_round(1, range(30)).metrics
    own = evaluate(model, model.initial, users)
    for metric, values in own.items():
        assert figures[f"evaluate.{metric}.devices"] == pytest.approx(values.mean(), abs=1e-5)
        weighted = (values * users.sizes).sum() / users.sizes.sum()
        assert figures[f"evaluate.{metric}"] == pytest.approx(weighted, abs=1e-5)
        half = 1.96 * values.std(ddof=1) / np.sqrt(30)
        assert figures[f"evaluate.{metric}.devices.high"] == pytest.approx(values.mean() + half, abs=1e-5)
    assert figures["evaluate.devices"] == 30
    assert figures["evaluate.examples"] == pytest.approx(users.sizes.sum(), rel=1e-6)


def test_a_bound_that_no_report_reaches_changes_no_figure():
    users, _ = datasets.users("digits", None, 12)
    model = Model(load("logreg", (1, 8, 8), 10))
    plain = Engine(model, create("evaluate"), users).run_round(1, range(12)).metrics
    clipped = Engine(model, create("evaluate", {"clip_norm": 8}), users).run_round(1, range(12)).metrics
    assert clipped == pytest.approx(plain)  # bounded reports are added in float64, others in float32


@pytest.mark.long
@pytest.mark.parametrize("name", EVALUATIONS)
def test_devices_in_typescript_evaluate_with_those_in_python(name, federate):
    node()  # a skip where there is none
    kinds = counted_kinds("node:3,python:3")
    users, _ = datasets.users("digits", None, 6)
    model, algorithm = Model(load("logreg", (1, 8, 8), 10), SEED), create(name, {"batch_size": 5})
    run = federate(model, algorithm, users, {"onnx": "onnxruntime"}, kinds=kinds, rounds=1, goal=6)
    assert dict(run.reported) == {kind.name: 3 for kind in kinds}
    engine = Engine(model, algorithm, users, seed=SEED)
    assert worst_figure(engine, users, run.cohorts, list(map(others, run.metrics))) < AGREE


@pytest.mark.long
@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_fleet_and_the_engine_give_the_same_figures(name, federate, capsys):
    users, _ = datasets.users("digits", None, 12)
    model = Model(load("digits_cnn", (1, 8, 8), 10), SEED)
    run = federate(model, create(name, {"batch_size": 5}), users, {"onnx": "onnxruntime"}, rounds=2)
    assert run.difference == 0  # the model stays
    graphs = export_graphs(model, create(name, {"batch_size": 5}))
    for computing in (Computing(), Computing(graphs=graphs)):
        engine = Engine(model, create(name, {"batch_size": 5}), users, seed=SEED, computing=computing)
        apart = worst_figure(engine, users, run.cohorts, list(map(others, run.metrics)))
        engine = Engine(model, create(name, {"batch_size": 5}), users, seed=SEED, computing=computing)
        of_ends = worst_figure(engine, users, run.cohorts, list(map(ends, run.metrics)))
        with capsys.disabled():
            print(
                f"\n{name}: {len(run.metrics[0])} figures, at most {apart:.1e} apart, ends of intervals {of_ends:.1e}"
            )
        assert apart < AGREE
        assert of_ends < OF_LOSS


def test_a_secure_fleet_gives_the_figures_of_the_engine(federate, capsys):
    users, _ = datasets.users("digits", None, 12)
    model, algorithm = Model(load("logreg", (1, 8, 8), 10), SEED), create("evaluate", {"batch_size": 5})
    run = federate(model, algorithm, users, {"onnx": "onnxruntime"}, rounds=1, secagg=Secagg())
    engine = Engine(model, algorithm, users, seed=SEED)
    [cohort], [secure] = run.cohorts, run.metrics
    exact = engine.run_round(1, [users.clients.index(cohort[slot]) for slot in sorted(cohort)], sorted(cohort)).metrics
    apart = {name: abs(secure[name] - exact[name]) for name in exact if name.startswith("evaluate.")}
    counts = {"evaluate.devices", "evaluate.examples"}
    percentiles = {name for name in apart if ".p" in name}
    ends_of_intervals = set(ends(apart))
    means = set(apart) - counts - percentiles - ends_of_intervals
    worst = [max(apart[name] for name in names) for names in (counts, means, percentiles, ends_of_intervals)]
    with capsys.disabled():
        print("\nsecure evaluation: counts {:.1e}, means {:.1e}, percentiles {:.1e}, ends {:.1e} apart".format(*worst))
    assert means == {f"evaluate.{name}{of}" for name in ("loss", "accuracy") for of in ("", ".devices")}
    assert (len(percentiles), len(ends_of_intervals)) == (10, 8)
    assert worst[0] == 0
    assert worst[1] < 1e-3
    assert worst[2] < 1e-6  # as bins hold whole numbers
    assert worst[3] < 3e-2  # they are roots of differences between sums that are rounded


@pytest.fixture(scope="module")
def logreg(tmp_path_factory):
    """Bundles of one model: the one that trains it, and the one that evaluates it."""
    folder, model = tmp_path_factory.mktemp("logreg"), Model(load("logreg", (1, 8, 8), 10), SEED)
    return [export_bundle(model, create(name, {"batch_size": 5}), folder / name) for name in ("fedavg", "evaluate")]


def test_no_device_trains_a_model_and_is_held_out_to_evaluate_it(tmp_path, coordinators, logreg, servers):
    train, evaluation = logreg
    users, _ = datasets.users("digits", None, 12)
    give_keys(tmp_path / "devices", users)
    shared = {"population": "p", "over_selection": 1.0, "hold_out_devices": 0.5}
    with coordinators.local(tmp_path, SEED) as local:
        training = local.store.register_task(train, TaskSettings(goal=3, rounds=2, **shared)).id
        with starting_from(local.store, evaluation, Evaluated(f"{training}@0", None)) as (bundle, origin):
            settings = TaskSettings(goal=3, rounds=2, on_held_out=True, **shared)
            measuring = local.store.register_task(bundle, settings, evaluation=origin).id
        devices = {"folder": tmp_path / "devices", "concurrency": 12, "sessions": 12}
        config = FleetConfig(coordinator=local.url, population="p", **devices)
        clients = Fleet(config, users).run(servers=servers).clients
        tasks, over = (training, measuring), {TaskState.COMPLETED}
        wait_until(lambda: {local.store.task(task).state for task in tasks} == over)
        cohorts = [[counted_cohort(local.store, task, number, clients) for number in (1, 2)] for task in tasks]
    trained, measured = ({client for cohort in rounds for client in cohort.values()} for rounds in cohorts)
    assert (len(trained), len(measured)) == (6, 6)
    assert trained.isdisjoint(measured)
    held_out = {client for device, client in clients.items() if is_held_out("p", device, 0.5)}
    assert measured == held_out


def test_a_fleet_evaluates_the_model_of_every_round(tmp_path, coordinators, logreg, servers):
    train, evaluation = logreg
    users, _ = datasets.users("digits", None, 12)
    give_keys(tmp_path / "devices", users)
    held_out = [is_held_out("p", device_id(key_of(client)), 0.5) for client in users.clients]
    sides = [users.subset([at for at, out in enumerate(held_out) if out == side]) for side in (False, True)]
    assert [len(side) for side in sides] == [6, 6]
    settings = TaskSettings(population="p", over_selection=1.0, hold_out_devices=0.5, goal=2, rounds=3)
    with coordinators.local(tmp_path, SEED) as local:
        store = local.store
        task = store.register_task(train, settings, evaluation=Regularly(1, evaluation)).id
        devices = {"folder": tmp_path / "devices", "concurrency": 6, "sessions": 6}
        config = FleetConfig(coordinator=local.url, population="p", **devices)
        Fleet(config, sides[0]).run(servers=servers)
        wait_until(lambda: store.task(task).state is TaskState.COMPLETED)  # while nobody evaluates
        made = store.evaluations(task)
        assert [(one.round, one.state) for one in made] == [(number, TaskState.ACTIVE) for number in (1, 2, 3)]
        clients = Fleet(config, sides[1]).run(servers=servers).clients
        wait_until(lambda: {one.state for one in store.evaluations(task)} == {TaskState.COMPLETED})
        made = store.evaluations(task)
        cohorts = [counted_cohort(store, one.task, 1, clients) for one in made]
        models = [store.checkpoint(task, one.round)["params"] for one in made]
    assert sorted(client for cohort in cohorts for client in cohort.values()) == sorted(sides[1].clients)
    model = Model(load("logreg", (1, 8, 8), 10), SEED)
    for one, cohort, params in zip(made, cohorts, models, strict=True):
        members = users.subset([users.clients.index(client) for client in cohort.values()])
        own = evaluate(model, params, members)["loss"]
        assert one.metrics["evaluate.loss.devices"] == pytest.approx(own.mean(), abs=1e-5)


def test_a_secure_training_is_evaluated_under_its_release(tmp_path, coordinators, logreg, capsys):
    node()  # a skip where there is none
    model, (train, evaluation) = Model(load("logreg", (1, 8, 8), 10), SEED), logreg
    users, _ = datasets.users("digits", None, 24)
    give_keys(tmp_path / "devices", users)
    held_out = [is_held_out("p", device_id(key_of(client)), 0.5) for client in users.clients]
    sides = [users.subset([at for at, out in enumerate(held_out) if out == side]) for side in (False, True)]
    goal = min(map(len, sides))
    assert goal >= 8
    shared = {"over_selection": 1.0, "hold_out_devices": 0.5, "seed": SEED, "secagg": Secagg()}
    settings, key = TaskSettings(population="p", goal=goal, rounds=2, **shared), SigningKey.new(tmp_path / "key")
    kinds = counted_kinds(f"node:2,python:{goal - 2}")
    members = [side.subset(range(goal)) for side in sides]
    for client, kind in zip(members[0].clients + members[1].clients, 2 * assign_kinds(kinds, goal), strict=True):
        if kind.host == "node":
            give_node_key(tmp_path / "devices", client)
    loaded = {kind.host: ["onnxruntime"] for kind in kinds}
    with coordinators.local(tmp_path, SEED, secure=True) as local, fork_servers(loaded) as servers:
        store = local.store
        task = local.create_task(train, settings, key, Regularly(1, evaluation))
        clients, reported = {}, []
        for side in members:
            config = FleetConfig(
                coordinator=local.url,
                population="p",
                folder=tmp_path / "devices",
                concurrency=goal,
                sessions=2 * goal,
                kinds=kinds,
                policy=Policy(signers=(key.signer,), require_secure_aggregation=True),
            )
            summary = Fleet(config, side).run(servers=servers)
            clients |= summary.clients
            reported.append({kind: endings["reported"] for kind, endings in summary.by_kind.items()})
        wait_until(lambda: {one.state for one in store.evaluations(task.id)} == {TaskState.COMPLETED})
        made = store.evaluations(task.id)
        rows = [store.task(one.task) for one in made]
        cohorts = [counted_cohort(store, one.task, 1, clients) for one in made]
        models = [store.checkpoint(task.id, one.round)["params"] for one in made]
        rounds = store.rounds(task.id)
    assert [(one.round, len(cohort)) for one, cohort in zip(made, cohorts, strict=True)] == [(1, goal), (2, goal)]
    assert reported == 2 * [{"node": 4, "python": 2 * (goal - 2)}]
    assert [row.release for row in rows] == [task.release, task.release]
    assert not np.array_equal(*models)
    assert len(rounds) == 2
    for one, cohort, params in zip(made, cohorts, models, strict=True):
        engine = Engine(model, create("evaluate", {"batch_size": 5}), users, seed=SEED)
        engine.restore({**engine.state, "params": params})
        slots = sorted(cohort)
        exact = engine.run_round(1, [users.clients.index(cohort[slot]) for slot in slots], slots).metrics
        apart = {name: abs(one.metrics[name] - value) for name, value in exact.items() if name.startswith("evaluate.")}
        with capsys.disabled():
            print(f"\nround {one.round}: loss {one.metrics['evaluate.loss']:.4f}, {apart['evaluate.loss']:.1e} apart")
        assert (apart["evaluate.devices"], apart["evaluate.examples"]) == (0, 0)
        assert max(apart[f"evaluate.{name}"] for name in ("loss", "loss.devices", "accuracy")) < 1e-3


def key_of(client):
    """The public key of the device that `give_keys` gives a client."""
    private = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(client.encode()).digest())
    return key_text(private.public_key().public_bytes_raw())


def simulated(**settings):
    config = {"model": "logreg", "rounds": 1, "cohort": 40, "clients": 60, "engine": "torch", "processes": 1}
    return simulate(SimulationConfig(**config | settings))


@pytest.fixture
def files(tmp_path):
    """A model that was trained for some rounds, and the one before that."""
    config = SimulationConfig(model="logreg", rounds=20, clients=60, engine="torch", processes=1)
    training = training_of(config)
    paths = [tmp_path / name for name in ("before.safetensors", "after.safetensors")]
    for path in paths:
        safetensors.numpy.save_file(training.tensors(), path)
        for number in range(1, 21):
            training.run_round(number)
    return paths


def test_a_simulation_evaluates_and_compares_models_of_files(files):
    before, after = files
    first, last = (simulated(algorithm="evaluate", start=path) for path in files)
    assert first.figures["evaluate.loss"] > 1.2 * last.figures["evaluate.loss"]
    assert (first.figures["evaluate.devices"], first.params_sha256 == last.params_sha256) == (40, False)
    compared = simulated(algorithm="compare", start=after, against=before).figures
    differing = last.figures["evaluate.loss"] - first.figures["evaluate.loss"]
    assert compared["compare.loss"] == pytest.approx(differing, abs=1e-5)
    assert compared["compare.loss.high"] < 0
    assert compared["compare.loss.improved"] > 0.9


def test_a_training_has_no_figures_and_starts_from_a_file_too(files):
    fresh, warm = (simulated(rounds=2, start=path) for path in files)
    assert warm.test_loss < fresh.test_loss
    assert warm.figures == {}


def test_files_that_are_no_such_model_are_refused_by_a_simulation(files, tmp_path):
    with pytest.raises(EngineError, match="holds another model than the one that is named: tensor"):
        simulated(model="mlp", start=files[0])
    with pytest.raises(EngineError, match="cannot read the model in"):
        simulated(start=tmp_path / "missing")
    (tmp_path / "damaged").write_bytes(b"no model")
    with pytest.raises(EngineError, match="holds no model as runs"):
        simulated(start=tmp_path / "damaged")
    header = b'{"0.bias":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    (tmp_path / "halved").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(EngineError, match=r"holds no model as runs .*BF16"):
        simulated(start=tmp_path / "halved")
    with pytest.raises(EngineError, match="fedavg has no other model: leave against out"):
        simulated(against=files[0])
    with pytest.raises(EngineError, match="start is for federated training, not for the baseline local"):
        SimulationConfig(model="logreg", baseline="local", start=files[0])
    with pytest.raises(EngineError, match="a plan has its own initial state"):
        SimulationConfig(model="logreg", plan=tmp_path, start=files[0])
