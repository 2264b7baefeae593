"""Client states in the engine: what every client of the population keeps between rounds."""

import numpy as np
import pytest
import torch

from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.algorithms.fitting import for_model
from simulator.client_states import ClientStates
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.errors import EngineError
from simulator.population import Population
from tests.simulator.reference import reference_round
from tests.simulator.test_engine import uneven

COHORTS = [[0, 1, 2, 3], [3, 1], [2, 0, 1], [3]]


@pytest.mark.parametrize(
    ("name", "settings", "local"),
    [
        ("scaffold", {"option": "I"}, ""),
        ("scaffold", {"option": "II", "server_lr": 0.7}, ""),
        ("feddyn", {"alpha": 0.5}, ""),
        ("fedpd", {"eta": 2}, ""),
        ("fedper", {"client_optimizer": "momentum"}, "*.bias"),
        ("fedrep", {"head_epochs": 3}, "*.weight"),
    ],
)
def test_rounds_with_client_state_equal_the_readable_reference(name, settings, local):
    population, model = uneven((3, 17, 5, 12, 9)), Model(load("logreg").with_local(local))
    algorithm = create(name, {"batch_size": 5, "epochs": 2} | settings)
    algorithm = for_model(algorithm, model.metrics[1:], model.schema)
    engine = Engine(model, algorithm, population, seed=7, computing=Computing(at_once=2))
    state, kept = engine.state, [algorithm.init_client(torch.from_numpy(model.initial)) for _ in range(5)]
    for number, cohort in enumerate(COHORTS, start=1):
        engine.run_round(number, cohort)
        ours, shards = [kept[client] for client in cohort], [population.shard(client) for client in cohort]
        state = reference_round(model, algorithm, state, shards, number, 7, kept=ours, clients=len(population))
        for client, vectors in zip(cohort, ours, strict=True):
            kept[client] = vectors
    for key, vector in state.items():
        np.testing.assert_allclose(engine.state[key], vector, rtol=0, atol=1e-5 * np.abs(vector).max(), err_msg=key)
    for key, vectors in engine.client_states.items():
        expected = np.stack([client[key].numpy() for client in kept])
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=key)
        np.testing.assert_array_equal(vectors[4], kept[4][key])  # it was in no cohort


def test_diverging_client_keeps_what_it_had():
    population, model = uneven(), Model(load("logreg"))
    population.fields["x"][population.starts[1]] = np.inf
    engine = Engine(model, create("scaffold"), population)
    assert engine.run_round(1, [0, 1, 2]).excluded == 1
    kept = engine.client_states["c_i"]
    assert [bool(vector.any()) for vector in kept] == [True, False, True, False]
    # c stays the mean of all c_i: who was left out does not count in the share of clients either.
    np.testing.assert_allclose(engine.state["c"], kept.mean(0), rtol=0, atol=1e-7)


def test_most_algorithms_keep_nothing_on_clients():
    assert Engine(Model(load("logreg")), create("mimelite"), uneven()).client_states == {}


def test_client_states_that_do_not_fit_are_refused_with_their_size():
    with pytest.raises(EngineError, match=r"scaffold keeps 1,000 numbers .* 2,000,000,000 clients, 8,000.0 GB in all"):
        ClientStates.of(create("scaffold"), torch.zeros(1000), 2_000_000_000)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_client_states_lie_where_the_engine_computes():
    population, model, algorithm = uneven(), Model(load("logreg")), create("scaffold", {"batch_size": 5})
    engines = [Engine(model, algorithm, population, computing=Computing(device=device)) for device in ("cpu", "cuda")]
    for engine in engines:
        for number, cohort in enumerate(COHORTS, start=1):
            engine.run_round(number, cohort)
    ours, theirs = (engine.client_states["c_i"] for engine in engines)
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4 * np.abs(ours).max())


def test_a_copy_of_the_client_states_moves_nothing():
    engine = Engine(Model(load("logreg")), create("scaffold"), Population.of(["a"], [uneven().shard(0)]))
    engine.client_states["c_i"][:] = 1
    assert not engine.client_states["c_i"].any()
