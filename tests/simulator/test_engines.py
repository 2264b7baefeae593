"""The engines agree on every algorithm that devices run, and each says what it cannot do."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn

from export.errors import ExportError
from export.model import Model, ModelSpec, cross_entropy
from export.models import load
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.algorithm import keeps_client_state
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.question import QUESTION
from fedcore.plan import Field
from simulator.configuration import SimulationConfig
from simulator.engine import Engine
from simulator.engines.choice import choose
from simulator.engines.computing import Computing
from simulator.engines.graphs import export_graphs
from simulator.errors import EngineError
from simulator.population import Population
from simulator.simulation import Overrides, simulate
from tests.simulator.test_engine import uneven

SAMPLE = {"mime", "personalisation"}
GRAPHS_RUN = [name for name, one in ALGORITHMS.items() if not keeps_client_state(one()) and one.family != QUESTION]


def with_a_field_more(population):
    """The same population, whose examples have a field that no model reads."""
    return dataclasses.replace(population, fields={**population.fields, "z": population.fields["y"]})


def both(model, algorithm, population):
    """The engine torch and the engine graphs."""
    graphs = export_graphs(model, algorithm)
    return [Engine(model, algorithm, population, seed=7, computing=Computing(graphs=one)) for one in (None, graphs)]


@pytest.mark.parametrize(
    ("model_name", "name", "settings"),
    [
        ("mlp", "fedavg", {"batch_size": 5, "epochs": 2, "weighting": "uniform"}),
        ("tests.export.models:digits_dropout", "fedadam", {"batch_size": 5}),
        ("tests.export.models:digits_in_4_bits", "fedavg", {"batch_size": 5}),
        *(
            pytest.param("logreg", name, {"batch_size": 5}, marks=[] if name in SAMPLE else pytest.mark.long)
            for name in GRAPHS_RUN
        ),
    ],
)
def test_both_engines_reach_the_same_state_to_round_off(model_name, name, settings):
    population, model = with_a_field_more(uneven()), Model(load(model_name, (1, 8, 8), 10))
    plain, graphs = both(model, create(name, settings), population)
    start = plain.state["params"]
    for number, cohort in enumerate([[0, 1, 2, 3], [3, 1], [2, 0, 1], [1, 2]], start=1):
        expected, found = plain.run_round(number, cohort), graphs.run_round(number, cohort)
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
    for key, vector in plain.state.items():
        # The distance that training went, for the model; else the vector itself.
        size = np.linalg.norm(vector - start) if key == "params" else np.linalg.norm(vector)
        assert np.linalg.norm(graphs.state[key] - vector) <= 1e-5 * size, key
    assert np.array_equal(plain.state["params"], start) == (ALGORITHMS[name].family == EVALUATION)


def test_graphs_leave_a_diverging_client_out_in_value_and_in_weight():
    population, model, algorithm = uneven(), Model(load("logreg")), create("fedavg", {"batch_size": 5})
    broken = {name: array.copy() for name, array in population.fields.items()}
    broken["x"][population.starts[1]] = np.inf
    computing = Computing(graphs=export_graphs(model, algorithm))
    engines = [
        Engine(model, algorithm, users, computing=computing)
        for users in (Population(population.clients, broken, population.starts), population)
    ]
    found, expected = engines[0].run_round(1, [0, 1, 2]), engines[1].run_round(1, [0, 2], [0, 2])
    assert (found.excluded, found.metrics) == (1, expected.metrics)
    np.testing.assert_array_equal(engines[0].state["params"], engines[1].state["params"])


def chosen(wanted, name="fedavg", computing=Computing(), spec=None):
    """The choice for a model, by default one that both engines run."""
    return choose(wanted, Model(spec or load("logreg")), create(name, {"batch_size": 5}), uneven(), computing)


def test_what_graphs_cannot_run_is_refused_by_name():
    with pytest.raises(EngineError, match=r"graphs cannot run this: scaffold keeps vectors on clients.*engine torch"):
        chosen("graphs", "scaffold")
    with pytest.raises(EngineError, match="graphs cannot run this: graphs run on the CPU, not on cuda"):
        chosen("graphs", computing=Computing("cuda"))


@pytest.mark.parametrize(("name", "device"), [("fedavg", "cpu"), ("scaffold", "cpu"), ("fedavg", "cuda")])
def test_auto_takes_torch_and_exports_nothing(monkeypatch, name, device):
    monkeypatch.setattr("simulator.engines.graphs.build_plan", None)
    choice = chosen("auto", name, Computing(device))
    assert (choice.computing, choice.reason) == (Computing(device), "torch runs the model")


class Hinge(torch.autograd.Function):
    """ReLU with a gradient of its own, of which torch knows no form for several clients at once."""

    @staticmethod
    def forward(x):
        return x.clamp(min=0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0] > 0)


def with_loss_of(change):
    """logreg, whose outputs are changed before the loss."""
    spec = load("logreg")
    return dataclasses.replace(spec, loss=lambda outputs, label: spec.loss(change(outputs), label))


@pytest.mark.parametrize("computing", [Computing(), Computing(processes=2)])
def test_auto_takes_graphs_for_a_custom_gradient_and_says_so(computing, caplog):
    spec = with_loss_of(Hinge.apply)
    with pytest.raises(EngineError, match=r"does not run here.*vmap"):
        chosen("torch", computing=computing, spec=spec)
    assert not caplog.records
    choice = chosen("auto", computing=computing, spec=spec)
    assert choice.computing.engine == "graphs"
    (record,) = caplog.records
    assert record.getMessage() == f"the engine graphs trains, because {choice.reason}"
    assert "torch cannot train several clients together: the model logreg does not run here" in choice.reason


def test_a_custom_gradient_trains_alike_on_graphs_and_on_torch():
    spec, config = with_loss_of(Hinge.apply), {"model": "own", "rounds": 3, "cohort": 3, "processes": 1}
    given = Overrides(users=uneven(), model=spec)
    by_itself = simulate(SimulationConfig(**config), given=given)
    alone = simulate(SimulationConfig(engine="torch", at_once=1, **config), given=given)
    assert (by_itself.engine, alone.engine) == ("graphs", "torch")
    assert by_itself.test_loss == pytest.approx(alone.test_loss, rel=1e-5)


@pytest.mark.parametrize(("name", "device"), [("scaffold", "cpu"), ("fedavg", "cuda")])
def test_a_custom_gradient_without_graphs_is_refused_in_torchs_words(name, device):
    with pytest.raises(EngineError, match=r"does not run here.*vmap"):
        chosen("auto", name, Computing(device), with_loss_of(Hinge.apply))


def test_what_neither_engine_runs_is_refused_with_both_reasons():
    spec = with_loss_of(lambda outputs: outputs * float(outputs.sum() > -1e9))
    with pytest.raises(EngineError, match=r"does not run here.*vmap.*no.* graphs of it.*branches.*--at-once=1"):
        chosen("auto", spec=spec)
    choice = chosen("auto", computing=Computing(at_once=1), spec=spec)
    assert choice.computing.engine == "torch"


def test_a_model_without_graphs_is_refused_where_they_are_asked_for():
    spec = with_loss_of(lambda outputs: outputs + torch.lgamma(outputs.detach().abs() + 1))
    with pytest.raises(ExportError, match="operator"):
        chosen("graphs", spec=spec)
    assert chosen("auto", spec=spec).computing.engine == "torch"


def test_clients_of_few_steps_train_in_larger_groups_unless_told():
    model = Model(load("logreg"))
    assert [Computing().together(model, steps) for steps in (1, 2, 3, None)] == [20, 20, 10, 10]
    assert Computing(at_once=4).together(model, 1) == 4


@pytest.mark.parametrize("wanted", ["auto", "graphs"])
def test_no_gradient_is_computed_here_where_processes_are_to_be_forked(monkeypatch, wanted):
    calls, loss = [], Model.loss
    monkeypatch.setattr(Model, "loss", lambda *given: calls.append(1) or loss(*given))
    chosen(wanted, computing=Computing(processes=2))
    assert not calls
    chosen(wanted)
    assert calls


def test_a_simulation_says_which_engine_trained_and_why():
    config = {"model": "logreg", "rounds": 2, "cohort": 3}
    results = {engine: simulate(SimulationConfig(engine=engine, **config)) for engine in ("torch", "graphs", "auto")}
    assert {asked: result.engine for asked, result in results.items()} == {
        "torch": "torch",
        "graphs": "graphs",
        "auto": "torch",
    }
    assert results["graphs"].engine_reason == "as asked"
    assert results["graphs"].test_loss == pytest.approx(results["torch"].test_loss, rel=1e-5)
    assert results["auto"].params_sha256 == results["torch"].params_sha256
    again = simulate(SimulationConfig(engine="graphs", **config))
    assert again == results["graphs"]


def test_baselines_that_have_no_choice_refuse_engine_and_processes():
    with pytest.raises(EngineError, match="engine and ray are for federated training, not for the baseline local"):
        SimulationConfig(model="logreg", baseline="local", engine="graphs", ray="auto")
    with pytest.raises(EngineError, match="processes is for federated training, not for the baseline dane"):
        SimulationConfig(model="ridge", baseline="dane", processes=2)


class Branching(nn.Linear):
    """A linear model that gives nothing for batches whose mean is high."""

    def forward(self, x):
        return super().forward(x) * (0.0 if bool(x.mean() > 0.5) else 1.0)


class Masking(nn.Linear):
    """The same without a branch."""

    def forward(self, x):
        return super().forward(x) * (x.mean() <= 0.5)


@pytest.mark.parametrize("name", ["logreg", "digits_cnn"])
def test_another_number_of_clients_at_once_changes_round_off_alone(name):
    population, model = uneven((3, 17, 5, 12, 9, 40, 22)), Model(load(name))

    def trained(at_once):
        algorithm, computing = create("fedavg", {"batch_size": 5}), Computing(at_once=at_once)
        engine = Engine(model, algorithm, population, seed=7, computing=computing)
        for number in range(1, 6):
            engine.run_round(number, range(7))
        return engine.state["params"]

    reached = trained(7)
    np.testing.assert_array_equal(trained(7), reached)
    for at_once in (1, 3):
        distance = np.linalg.norm(trained(at_once) - reached)
        assert distance < 1e-5 * np.linalg.norm(reached - model.initial)


def test_a_model_that_branches_on_values_follows_those_of_every_step():
    random, inputs, label = np.random.default_rng(0), Field("x", "float32", (3,)), Field("y", "int64", high=2)
    shards = [
        {"x": (mean + random.uniform(-0.1, 0.1, (4, 3))).astype(np.float32), "y": random.integers(0, 2, 4)}
        for mean in (0.2, 0.8, 0.3, 0.9)
    ]
    population = Population.of(["a", "b", "c", "d"], shards, 2)
    found = []
    for module in (Branching, Masking):
        model = Model(ModelSpec("own", functools.partial(module, 3, 2), cross_entropy, (inputs,), label))
        one = Engine(model, create("fedavg", {"batch_size": 4}), population, computing=Computing(at_once=1))
        one.run_round(1, range(4))
        found.append(one.state["params"])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-7)
