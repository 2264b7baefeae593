"""The engines agree on every algorithm that devices run, and each says what it cannot do."""

import dataclasses
import functools
import math
from importlib.metadata import Distribution, PackageNotFoundError

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from export.errors import ExportError
from export.model import Model, ModelSpec, cross_entropy
from export.models import load
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.algorithm import keeps_client_state
from fedcore.plan import Field
from simulator.engine import Engine
from simulator.engines.calibration import FEW, MANY, Figures, GraphFigures, Notes, Task, seconds_per_step
from simulator.engines.choice import PATIENCE_S, choose
from simulator.engines.computing import Computing
from simulator.engines.graphs import export_graphs
from simulator.engines.vectorised import VectorisedTrainer
from simulator.errors import EngineError
from simulator.population import Population
from simulator.purity import check_model
from simulator.simulation import SimulationConfig, simulate
from tests.simulator.test_engine import uneven

pytestmark = pytest.mark.usefixtures("own_cache")
SAMPLE = {"mimelite", "mime"}
DEVICES_RUN = [name for name, one in ALGORITHMS.items() if not keeps_client_state(one())]


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
        *(
            pytest.param("logreg", name, {"batch_size": 5}, marks=[] if name in SAMPLE else pytest.mark.long)
            for name in DEVICES_RUN
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
    assert not np.array_equal(plain.state["params"], start)


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


def task(clients, name="fedavg", **settings):
    return Task(Model(load("logreg")), create(name, settings), uneven(), 4, clients)


def test_what_graphs_cannot_run_is_refused_by_name():
    with pytest.raises(EngineError, match=r"graphs cannot run this: scaffold keeps vectors on clients.*engine torch"):
        choose("graphs", task(1, "scaffold"), Computing())
    with pytest.raises(EngineError, match="graphs cannot run this: graphs run on the CPU, not on cuda"):
        choose("graphs", task(1), Computing("cuda"))


@pytest.mark.parametrize(("name", "device", "says"), [("scaffold", "cpu", "keeps vectors"), ("fedavg", "cuda", "cuda")])
def test_what_graphs_cannot_run_is_for_torch_by_itself(name, device, says):
    choice = choose("auto", task(10**9, name), Computing(device))
    assert choice.computing == Computing(device)
    assert says in choice.reason


def test_a_model_without_graphs_is_refused_or_left_to_torch():
    spec = load("logreg")

    def odd(outputs, label):
        return spec.loss(outputs, label) + torch.lgamma(outputs.detach().abs() + 1).sum(1)

    unexportable = dataclasses.replace(task(10**9), model=Model(dataclasses.replace(spec, loss=odd)))
    with pytest.raises(ExportError):
        choose("graphs", unexportable, Computing())
    choice = choose("auto", unexportable, Computing())
    assert choice.computing.engine == "torch"
    assert choice.reason.startswith("there are no graphs of this model: operator")


def test_clients_of_few_steps_train_in_larger_groups_unless_told():
    model = Model(load("logreg"))
    assert [Computing().together(model, steps) for steps in (1, 2, 3, None)] == [20, 20, 10, 10]
    assert Computing(at_once=4).together(model, 1) == 4


def test_auto_exports_nothing_for_little_work_and_measures_once():
    little = task(10)
    choice = choose("auto", little, Computing())
    assert choice.computing.engine == "torch"
    assert "CPU s of steps are too few to export graphs for" in choice.reason
    assert Notes(little).read().of_graphs is None
    assert choose("auto", little, Computing()) == choice


def test_auto_calibrates_both_engines_for_much_work():
    much = task(10**7)
    choice = choose("auto", much, Computing())
    figures = Notes(much).read()
    faster = figures.of_graphs.step_s < figures.torch_s
    assert choice.computing.engine == ("graphs" if faster else "torch")
    assert "CPU ms on graphs" in choice.reason
    assert choose("auto", much, Computing()).reason == choice.reason


def test_no_gradient_is_computed_here_where_processes_are_to_be_forked(monkeypatch):
    calls, loss = [], Model.loss
    monkeypatch.setattr(Model, "loss", lambda *given: calls.append(1) or loss(*given))
    choice = choose("auto", task(10**7), Computing(processes=2))
    assert "CPU ms on graphs" in choice.reason
    assert not calls
    check_model(task(1).model, uneven(), Computing(processes=2))
    assert not calls
    check_model(task(1).model, uneven(), Computing())
    assert calls


def test_calibration_takes_few_steps_however_many_epochs_a_client_has(monkeypatch):
    monkeypatch.setattr("simulator.engines.calibration.BUDGET_S", 0)
    monkeypatch.setattr("simulator.engines.calibration.LONG_S", math.inf)
    steps, batch = [], VectorisedTrainer._batch
    monkeypatch.setattr(VectorisedTrainer, "_batch", lambda *given: steps.append(1) or batch(*given))
    long = task(1, batch_size=20, epochs=500)
    seconds_per_step(long, Computing())
    assert len(steps) == 2 * FEW
    seconds_per_step(long, Computing(), Computing())
    assert len(steps) == 2 * FEW + 2 * (2 * FEW + 2 * MANY)


@pytest.mark.parametrize(
    ("clients", "torch_s", "graphs_s", "export_s", "engine"),
    [
        (10**6, 1e-3, 2e-3, 1.0, "torch"),
        (10**6, 1e-3, 5e-4, 1.0, "graphs"),
        (10**6, 1e-3, 5e-4, 1e5, "torch"),
        (100, PATIENCE_S / 1000, 1e-9, 0.0, "torch"),
    ],
)
def test_the_choice_counts_the_export_and_takes_the_lesser_time(clients, torch_s, graphs_s, export_s, engine):
    asked = task(clients)
    Notes(asked).write(Figures(torch_s, GraphFigures(graphs_s, export_s)))
    assert choose("auto", asked, Computing()).computing.engine == engine


def test_notes_are_of_one_model_algorithm_and_kind_of_cohort(tmp_path):
    Notes(task(1)).write(Figures(1.0))
    assert Notes(task(99)).read() == Figures(1.0)
    of_other_fields = dataclasses.replace(task(1), model=Model(load("logreg", (64,), 10)))
    of_longer_clients = dataclasses.replace(task(1), population=uneven((300, 170, 500, 120)))
    of_larger_cohorts = dataclasses.replace(task(1), cohort=40)
    others = (task(1, "fedadam"), task(1, batch_size=6), of_other_fields, of_longer_clients, of_larger_cohorts)
    for other in others:
        assert Notes(other).read() is None
    (path,) = (tmp_path / "muster").iterdir()
    path.write_bytes(msgspec.json.encode({"torch_s": "fast"}))
    assert Notes(task(1)).read() is None


OWN_MODEL = """
import dataclasses
from export.models import load

def own():
    spec = load("logreg")
    return dataclasses.replace(spec, loss=lambda outputs, label: spec.loss(outputs, label))
"""


def test_notes_are_of_the_code_of_an_own_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = tmp_path / "own_model_of_notes.py"
    code.write_text(OWN_MODEL)
    own = dataclasses.replace(task(1), model=Model(load("own_model_of_notes:own")))
    Notes(own).write(Figures(1.0))
    assert Notes(own).read() == Figures(1.0)
    code.write_text(OWN_MODEL.replace("spec.loss(", "2 * spec.loss("))
    assert Notes(own).read() is None


def test_notes_need_no_distribution_of_a_certain_name(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)  # as where onnxruntime-gpu gives the module onnxruntime

    monkeypatch.setattr(Distribution, "from_name", absent)
    Notes(task(1)).write(Figures(1.0))
    assert Notes(task(1)).read() == Figures(1.0)


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
    with pytest.raises(
        EngineError, match="engine, processes and ray are for federated training, not for the baseline local"
    ):
        SimulationConfig(model="logreg", baseline="local", engine="graphs")
    with pytest.raises(EngineError, match="not for the baseline dane"):
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
