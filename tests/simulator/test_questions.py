"""Questions to populations: exact sums, the rows that devices would draw, the fleet's answer, noise, and memory."""

import resource

import numpy as np
import pytest

from coordinator.store.tasks import Secagg
from export.model import Model
from export.questions.builtin import BuiltIn, compile_built_in
from fedcore.batching import StreamKey, permutation
from fedcore.plan import Field
from simulator import datasets
from simulator.population import Population
from simulator.questions import ask_population
from tests.sampled import sampled
from tests.simulator.federation import GOAL

Y = Field("y", "int64", (), 10)


def asked_of(users, text, fields, seed=0, **promise):
    word, *rest = text.split()
    made = compile_built_in(BuiltIn.parse([word, *rest]), fields, minimum_devices=1, private=bool(promise))
    return ask_population(made, users, seed=seed, **promise)


def population(clients, source):
    sizes = source.integers(1, 30, clients)
    shards = [{"y": source.integers(0, 10, size)} for size in sizes]
    return Population.of([f"user {user}" for user in range(clients)], shards, 10)


def test_clients_without_rows_are_in_no_size():
    users = Population(("a", "b", "c"), {"y": np.arange(4)}, np.array([0, 3, 3, 4]))
    found = asked_of(users, "sizes", [Y])
    assert [row[:3] for row in found.rows] == [(1, 1, 0.5), (2, 1, 0.5)]
    assert found.devices == 2


def test_rows_of_a_client_are_those_that_its_device_would_draw():
    users = population(50, np.random.default_rng(0))
    found = asked_of(users, "labels y MAX 5 ROWS PER DEVICE", [Y], seed=7)
    counts = np.zeros(10, int)
    for client in range(50):
        rows = users.shard(client)["y"]
        drawn = permutation(StreamKey(7, 1, client), 0, 0, len(rows))[:5]
        counts += np.bincount(rows[drawn], minlength=10)
    assert [row[1] for row in found.rows] == counts.tolist()


@pytest.mark.parametrize("secagg", sampled([None, Secagg()], [Secagg()]), ids=["plain", "secure"])
def test_a_fleets_answer_is_the_engines_to_the_bit(secagg, federate):
    users, _ = datasets.users("digits", None, 12)
    text = "labels y MAX 9 ROWS PER DEVICE"
    made = compile_built_in(BuiltIn.parse(text.split()), [Y], minimum_devices=1, secure=secagg is not None)
    run = federate(Model(made.spec()), made.algorithm(), users, {"onnx": "onnxruntime"}, rounds=2, secagg=secagg)
    assert run.difference == 0
    assert all(way > GOAL for way in run.ways)


def test_noise_is_as_large_as_the_answer_says_it_is():
    users = population(200, np.random.default_rng(1))
    exact = asked_of(users, "labels y MAX 3 ROWS PER DEVICE", [Y])
    within, total = 0, 0
    for seed in range(20):
        found = asked_of(users, "labels y MAX 3 ROWS PER DEVICE", [Y], epsilon=4.0, delta=1e-4, seed=seed)
        drawn = {row[0]: row for row in asked_of(users, "labels y MAX 3 ROWS PER DEVICE", [Y], seed=seed).rows}
        for row, error in zip(found.rows, found.errors, strict=True):
            within += sum(abs(row[place] - drawn[row[0]][place]) <= error[place] for place in (1, 2))
            total += 2
    assert len(exact.rows) == 10
    assert total > 300
    assert within / total > 0.92


def test_20000_clients_answer_within_100_mb():
    source = np.random.default_rng(2)
    users = population(20_000, source)
    asked_of(users.subset(range(10)), "labels y", [Y])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = asked_of(users, "labels y", [Y])
    assert [row[1] for row in found.rows] == np.bincount(users.fields["y"]).tolist()
    assert found.devices == 20_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
