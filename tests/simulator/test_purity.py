"""Simulations refuse what export refuses, before their first round, and train what only looks alike as torch does."""

import numpy as np
import pytest
import torch

from export.errors import ExportError
from export.model import Model
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.algorithm import keeps_client_state
from fedcore.algorithms.local_training import PartlyLocal
from fedcore.algorithms.question import QUESTION
from simulator.configuration import SimulationConfig
from simulator.engine import Engine, evaluate
from simulator.engines.computing import Computing
from simulator.engines.graphs import export_graphs
from simulator.errors import EngineError
from simulator.population import Population
from simulator.simulation import Overrides, simulate
from tests.export import impure, models
from tests.sampled import covering, sampled

SIZES = (9, 5, 7, 6, 8)


def users(spec, sizes=SIZES):
    """Random examples for a model."""
    random = np.random.default_rng(0)

    def drawn(field, count):
        if field.high is not None:
            return random.integers(0, field.high, (count, *field.shape))
        return random.normal(size=(count, *field.shape)).astype(np.float32)

    shards = [{field.name: drawn(field, count) for field in spec.fields} for count in sizes]
    return Population.of([f"u{number}" for number in range(len(sizes))], shards, spec.label.high)


def simulated(spec, algorithm="fedavg", **config):
    """Two rounds of batches of four."""
    chosen = create(algorithm, {"batch_size": 4})
    given = Overrides(users=users(spec), model=spec, algorithm=chosen)
    return simulate(SimulationConfig(model="own", rounds=2, cohort=3, **config), given=given)


@pytest.mark.parametrize("name", impure.REFUSED)
def test_an_impure_model_is_not_simulated_and_the_cause_is_named(name):
    spec, words = impure.REFUSED[name]
    rounds = []
    with pytest.raises(ExportError, match=words):
        simulate(
            SimulationConfig(model="own", rounds=2, cohort=3, engine="torch", processes=1),
            lambda number, point: rounds.append(number),
            given=Overrides(users=users(spec), model=spec, algorithm=create("fedavg", {"batch_size": 4})),
        )
    assert not rounds


WAYS = {
    "graphs": {"engine": "graphs", "processes": 1},
    "graphs in several processes": {"engine": "graphs", "processes": 2},
    "the engine that is chosen": {"processes": 1},
    "several processes": {"engine": "torch", "processes": 2},
    "a client at a time": {"engine": "torch", "at_once": 1},
    "the baseline local": {"baseline": "local"},
    "the baseline pooled": {"baseline": "pooled"},
}


@pytest.mark.parametrize(
    ("way", "name"),
    covering(WAYS, ["NumPy's random numbers", "a counter without effect yet", "negatives from the batch"]),
)
def test_no_way_to_simulate_takes_an_impure_model(name, way):
    spec, words = impure.REFUSED[name]
    with pytest.raises(ExportError, match=words):
        simulated(spec, **WAYS[way])


@pytest.mark.parametrize(("name", "at_once"), covering(impure.SIMULATED, [None, 1]))
def test_a_pure_model_is_simulated_whatever_it_keeps(name, at_once):
    run = simulated(impure.SIMULATED[name](), engine="torch", processes=1, at_once=at_once)
    assert np.isfinite(run.test_loss)


@pytest.mark.parametrize(
    ("make", "words"), [(models.label_beyond, "fails for 8 in field 'y'"), (models.token_beyond, "fails for 299 in")]
)
def test_a_field_that_admits_too_much_is_refused_before_round_1(make, words):
    """Though no user's examples hold it."""
    spec = make()
    held = users(spec)
    for values in held.fields.values():
        np.mod(values, 5, out=values, casting="unsafe")
    with pytest.raises(ExportError, match=words):
        simulate(
            SimulationConfig(model="own", rounds=2, cohort=3, engine="torch", processes=1),
            given=Overrides(users=held, model=spec, algorithm=create("fedavg", {"batch_size": 4})),
        )


def test_a_model_that_does_not_run_is_refused_in_words_before_round_1():
    spec = impure.spec(lambda net, hidden: net.nope(hidden))
    with pytest.raises(ExportError, match=r"own does not run.*nope"):
        simulated(spec, engine="torch", processes=1)


def rounds_of_torch(spec, population, lr, rounds):
    """FedAvg of whole shards by plain torch: after each round the model (D,), and its loss by users."""
    module = Model(spec).module
    own = [one for one in module.parameters() if one.requires_grad]
    shards = [population.shard(user) for user in range(len(population))]
    shards = [{key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in one.items()} for one in shards]

    def loss(shard):
        return spec.loss(module(shard["x"]), shard["y"]).mean()

    for _ in range(rounds):
        start, moved = torch.nn.utils.parameters_to_vector(own).detach(), 0
        for shard in shards:
            torch.nn.utils.vector_to_parameters(start, own)
            gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss(shard), own)])
            moved = moved - len(shard["y"]) * lr * gradient
        torch.nn.utils.vector_to_parameters(start + moved / population.starts[-1], own)
        yield torch.nn.utils.parameters_to_vector(own).detach().numpy(), [loss(shard).item() for shard in shards]


@pytest.mark.parametrize("make", [impure.tied, impure.tempered])
@pytest.mark.parametrize("computing", [Computing(at_once=1), Computing(at_once=5), "graphs"])
def test_rounds_of_a_tied_or_scalar_parameter_are_those_of_torch(make, computing):
    spec, algorithm = make(), create("fedavg", {"batch_size": 16, "client_lr": 0.5})
    population = users(spec)
    model = Model(spec)
    if computing == "graphs":
        computing = Computing(graphs=export_graphs(Model(spec), algorithm))
    engine, before = Engine(model, algorithm, population, computing=computing), model.initial
    for number, (expected, losses) in enumerate(rounds_of_torch(spec, population, 0.5, 4), 1):
        engine.run_round(number, range(len(population)))
        off = np.linalg.norm(engine.state["params"] - expected) / np.linalg.norm(expected - before)
        assert off < 1e-5, number
        told = evaluate(model, engine.state["params"], population)["loss"]
        np.testing.assert_allclose(told, losses, rtol=1e-4)
        before = expected


@pytest.mark.parametrize(
    "name",
    sampled(
        [name for name, one in ALGORITHMS.items() if one.family != QUESTION],
        ["fedavg", "mime", "evaluate", "scaffold", "fedrep"],
    ),
)
def test_every_algorithm_trains_a_scalar_parameter_with_every_engine(name):
    """Every run has one of one trip, of two, of forward passes, with vectors on clients, and with local parameters."""
    algorithm, population, found = create(name, {"batch_size": 4}), users(impure.tempered()), []
    spec = impure.tempered().with_local("temperature" if isinstance(algorithm, PartlyLocal) else "")
    computings = [Computing(at_once=1), Computing(at_once=3)]
    if not keeps_client_state(algorithm):
        computings.append(Computing(graphs=export_graphs(Model(impure.tempered()), algorithm)))
    for computing in computings:
        model = Model(spec)
        engine = Engine(model, algorithm, population, computing=computing)
        for number in (1, 2, 3):
            engine.run_round(number, [0, 1, 2])
        found.append(engine.state["params"] - model.initial)
    for one in found[1:]:
        assert np.linalg.norm(one - found[0]) <= 1e-4 * np.linalg.norm(found[0])


@pytest.mark.parametrize("compress", ["rotation", "low_rank=1", "subsample=0.5", "count_sketch=0.5", "rotation,bits=4"])
def test_every_compression_takes_a_scalar_parameter(compress):
    assert np.isfinite(simulated(impure.tempered(), compress=compress, engine="torch", processes=1).test_loss)


@pytest.mark.parametrize("name", ["random", "NumPy's random numbers"])
def test_the_engine_records_no_step_in_which_python_or_numpy_draws(name):
    spec, _ = impure.REFUSED[name]
    engine = Engine(Model(spec), create("fedavg", {"batch_size": 4}), users(spec))
    with pytest.raises(EngineError, match=r"numpy\.random.*a recorded step would do once"):
        engine.run_round(1, [0, 1])
