"""The vectorised engine computes what one client after the other computes."""

import dataclasses

import numpy as np
import pytest
import torch

from export.model import GradientOracle, Model, cross_entropy
from export.models import load
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.algorithm import ServerStep, keeps_client_state
from fedcore.algorithms.facts import for_model
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.question import QUESTION
from simulator import datasets
from simulator.engine import Engine, evaluate
from simulator.engines.computing import Computing
from simulator.engines.oracle import CohortOracle
from simulator.engines.vectorised import VectorisedTrainer
from simulator.errors import DatasetError, Diverged, EngineError
from simulator.population import Population
from tests.simulator.reference import reference_round

TUNED = ("fedavg", "fedadam", "mimelite")
SETTINGS = [
    *((name, {"batch_size": 5, "epochs": 2, "weighting": w}) for name in TUNED for w in ("examples", "uniform")),
    *(
        (name, {"batch_size": 5})
        for name, one in ALGORITHMS.items()
        if name not in {*TUNED, "fedpa"} and not keeps_client_state(one()) and one.family != QUESTION
    ),
    ("fedpa", {"batch_size": 5, "samples": 2, "steps_per_sample": 2, "burn_in_steps": 1, "burn_in_rounds": 1}),
    ("fedavg", {"batch_size": 5, "client_optimizer": "adam", "client_lr": 0.01}),
    ("mimelite", {"optimizer": "adam", "client_lr": 0.01, "batch_size": 5}),
]


def uneven(sizes=(3, 17, 5, 12), seed=0):
    random = np.random.default_rng(seed)
    shards = [{"x": random.normal(size=(n, 1, 8, 8)).astype(np.float32), "y": random.integers(0, 10, n)} for n in sizes]
    return Population.of([f"c{index}" for index in range(len(sizes))], shards)


@pytest.mark.parametrize("name", ["logreg", "mlp", "digits_cnn"])
def test_the_cohort_oracle_is_the_oracle_of_each_client(name):
    model, random = Model(load(name, (1, 8, 8), 10)), np.random.default_rng(1)
    x, y = random.normal(size=(3, 4, 1, 8, 8)).astype(np.float32), random.integers(0, 10, (3, 4))
    batch = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    params = torch.from_numpy(model.initial) + 0.1 * torch.randn(3, model.schema.size)
    cohort = CohortOracle(model, batch, mask)
    for given in (params, params[0]):
        losses, gradients, counts = cohort(given)
        for client in range(3):
            oracle = GradientOracle(model, {key: value[client] for key, value in batch.items()}, mask[client])
            loss, gradient, count = oracle(given[client] if given.dim() == 2 else given)
            torch.testing.assert_close(losses[client], loss)
            torch.testing.assert_close(gradients[client], gradient, atol=1e-6, rtol=1e-4)
            torch.testing.assert_close(counts[client], count)
            torch.testing.assert_close(cohort.sums_KM[client], oracle.sums)


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_three_rounds_equal_the_readable_reference(name, settings):
    """Convolutions are trained by some algorithms only: the recording of a step of theirs costs most of this."""
    population, model = uneven(), Model(load("digits_cnn" if name in TUNED else "mlp", (1, 8, 8), 10))
    algorithm = for_model(create(name, settings), model.metrics[1:], model.schema)
    engine = Engine(model, algorithm, population, seed=7)
    state = engine.state
    for number, cohort in enumerate([[0, 1, 2, 3], [3, 1], [2, 0, 1]], start=1):
        engine.run_round(number, cohort)
        state = reference_round(model, algorithm, state, [population.shard(c) for c in cohort], number, 7)
        for key, vector in state.items():
            gap = np.linalg.norm(engine.state[key] - vector) / (np.linalg.norm(vector) or 1.0)
            assert gap < 1e-5, (key, gap)


def test_update_is_told_how_many_reports_counted_and_which_layers():
    told = []

    class Told(FedAvg):
        def update(self, state, mean, step):
            told.append(step)
            return state

    population, model = uneven(), Model(load("logreg"))
    broken = {**population.fields, "x": population.fields["x"].copy()}
    broken["x"][population.starts[1]] = np.nan
    Engine(model, Told(), Population(population.clients, broken, population.starts)).run_round(1, [0, 1, 2])
    assert told == [ServerStep(devices=2, layers=model.schema.layers, participation=0.5)]
    assert [layer.stop - layer.start for layer in told[0].layers] == [640, 10]


def test_metrics_are_means_over_every_real_example():
    population, model = uneven(), Model(load("logreg"))
    algorithm = create("mimelite", {"batch_size": 5})
    result = Engine(model, algorithm, population).run_round(1, [0, 1, 2, 3])
    before = evaluate(model, model.initial, population)
    # The sweep measures the received model on all examples, padding not counted.
    for name in ("loss", "accuracy"):
        assert result.metrics[f"sweep.{name}"] == pytest.approx(
            np.average(before[name], weights=population.sizes), rel=1e-5
        )


def test_slots_key_the_order_of_examples_and_nothing_else():
    population, model, algorithm = uneven(), Model(load("logreg")), create("fedavg", {"batch_size": 5})

    def after(cohort, slots):
        engine = Engine(model, algorithm, population)
        engine.run_round(1, cohort, slots)
        return engine.state["params"]

    np.testing.assert_allclose(after([1, 3], [4, 9]), after([3, 1], [9, 4]), rtol=0, atol=1e-7)
    assert not np.allclose(after([1, 3], [4, 9]), after([1, 3], [9, 4]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("batch_size", [5, 17])
def test_diverging_client_counts_neither_in_value_nor_in_weight(batch_size):
    population, model = uneven(), Model(load("logreg"))
    algorithm = create("fedavg", {"batch_size": batch_size})
    broken = {name: array.copy() for name, array in population.fields.items()}
    broken["x"][population.starts[1]] = np.inf
    with_broken = Engine(model, algorithm, Population(population.clients, broken, population.starts))
    without = Engine(model, algorithm, population)
    found = with_broken.run_round(1, [0, 1, 2])
    assert found.excluded == 1
    assert found.metrics == pytest.approx(without.run_round(1, [0, 2], [0, 2]).metrics)
    np.testing.assert_allclose(with_broken.state["params"], without.state["params"], atol=1e-7)


def test_a_round_without_one_finite_report_is_an_error():
    population = uneven((4, 4))
    population.fields["x"][:] = np.nan
    with pytest.raises(Diverged, match=r"round 1: no client has a finite report: field 'x' of client .* holds NaN"):
        Engine(Model(load("logreg")), create("fedavg"), population).run_round(1, [0, 1])


def spec_with(loss):
    return dataclasses.replace(load("logreg"), loss=lambda outputs, label: loss(cross_entropy(outputs, label)))


@pytest.mark.parametrize(
    ("loss", "settings", "rounds", "says"),
    [
        (lambda each: each / 0, {}, 1, "logreg has a loss of inf before any training, on finite examples; look for"),
        (lambda each: (0 * each).sqrt() + each, {}, 1, "a finite loss, and a gradient that is not; look for"),
        (lambda each: each, {"client_lr": 1e38, "batch_size": 1}, 1, "training diverged; a lower client_lr"),
        (lambda each: each, {"client_lr": 1e38}, 2, "training diverged; a lower client_lr"),
    ],
)
def test_a_loss_that_is_not_finite_names_its_cause(loss, settings, rounds, says):
    engine = Engine(Model(spec_with(loss)), create("fedavg", settings), uneven((4, 4)))
    for number in range(1, rounds):
        engine.run_round(number, [0, 1])
    with pytest.raises(Diverged) as raised:
        engine.run_round(rounds, [0, 1])
    assert says in str(raised.value)
    assert str(raised.value).startswith(f"round {rounds}: ")


def test_running_a_round_does_not_touch_the_initial_model():
    model = Model(load("logreg"))
    before = model.initial.copy()
    Engine(model, create("mimelite"), uneven()).run_round(1, [0, 1])
    np.testing.assert_array_equal(model.initial, before)


def test_evaluation_is_per_client_whatever_the_batch():
    population, model = uneven(), Model(load("mlp", (1, 8, 8), 10))
    whole, pieces = evaluate(model, model.initial, population), evaluate(model, model.initial, population, batch_size=4)
    for name, values in whole.items():
        assert values.shape == (4,)
        np.testing.assert_allclose(values, pieces[name], rtol=1e-5)
    alone = evaluate(model, model.initial, population.subset([2]))
    np.testing.assert_allclose(alone["loss"], whole["loss"][2:3], rtol=1e-5)


def test_an_absent_compute_device_and_ill_fitting_examples_are_named():
    with pytest.raises(EngineError, match="'abacus'"):
        Engine(Model(load("logreg")), create("fedavg"), uneven(), computing=Computing(device="abacus"))
    with pytest.raises(DatasetError, match=r"field 'x' is float32\[1, 8, 8\] .* reads float32\[43\]"):
        Engine(Model(load("mlp")), create("fedavg"), uneven())
    with pytest.raises(DatasetError, match="outside 0 … 5"):
        evaluate(Model(load("mlp", (1, 8, 8), 6)), Model(load("mlp", (1, 8, 8), 6)).initial, uneven())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_the_gpu_reaches_the_cpus_model():
    population, model, algorithm = datasets.load("digits"), Model(load("digits_cnn")), create("mimelite")
    engines = [Engine(model, algorithm, population, computing=Computing(device=device)) for device in ("cpu", "cuda")]
    for engine in engines:
        for number in (1, 2, 3):
            engine.run_round(number, population.sample(20, 0, number))
    ours, theirs = (engine.state["params"] for engine in engines)
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(ours - model.initial) < 1e-4


@pytest.mark.parametrize("at_once", [1, 4])
def test_padding_of_last_batches_is_left_out_on_a_cpu(monkeypatch, at_once):
    shapes, batch = [], VectorisedTrainer._batch
    monkeypatch.setattr(
        VectorisedTrainer, "_batch", lambda *given: shapes.append(tuple(given[3].shape)) or batch(*given)
    )
    algorithm = create("fedavg", {"batch_size": 16})
    engine = Engine(Model(load("logreg")), algorithm, uneven(), computing=Computing(at_once=at_once))
    engine.run_round(1, [0, 1, 2, 3])
    assert shapes == ([(1, 16), (1, 2), (1, 12), (1, 6), (1, 4)] if at_once == 1 else [(4, 16), (1, 16)])
