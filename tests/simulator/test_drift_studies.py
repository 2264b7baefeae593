"""Studies of client drift and of Konečný et al.: what their trials measure."""

import json

import numpy as np
import pytest
import torch

from export.model import Model
from simulator.studies import find
from simulator.studies.client_drift import CLIENTS, descend
from simulator.studies.drift_on_users import LENGTH, WAYS, WINDOWS, compare, short_lines, small_lstm
from simulator.studies.federated_optimization import FEATURES, optimise, problem, regularised_logistic
from simulator.studies.trials import Trials

DESCENT = {"dissimilarity": 10.0, "cohort": CLIENTS, "seed": 0}


def test_fedavg_stops_short_of_the_minimum_and_scaffold_does_not():
    ends = {way: descend(way=way, rates=[0.3], rounds=15, **DESCENT)["0.3"][-1] for way in ("FedAvg", "SCAFFOLD")}
    assert ends["SCAFFOLD"] < 0.1 * ends["FedAvg"]
    assert ends["FedAvg"] < 1


def test_a_round_of_mime_is_both_of_its_trips():
    excess = descend(way="Mime, SGD", rates=[0.3], rounds=2, **DESCENT)["0.3"]
    assert len(excess) == 3
    assert excess[0] == 1.0 > excess[1] > excess[2]


def test_a_descent_that_diverges_has_no_numbers_from_there():
    assert descend(way="FedSGD", rates=[1e30], rounds=4, **DESCENT)["1e+30"][2:] == [None, None, None]


def test_the_regularised_model_is_the_linear_problem():
    of = problem("by user", 4, seed=1)
    model = Model(regularised_logistic(FEATURES, of.linear.l2))
    weights = np.random.default_rng(2).normal(size=FEATURES).astype(np.float32)
    batch = {name: torch.from_numpy(array) for name, array in of.train.fields.items()}
    leaf = torch.from_numpy(weights).requires_grad_()
    loss, _ = model.loss(model.tensors(leaf), batch, torch.ones(len(batch["y"])))
    loss.backward()
    assert loss.item() == pytest.approx(of.linear.value(weights[:, None].astype(np.float64)), rel=1e-5)
    np.testing.assert_allclose(leaf.grad, of.linear.gradient(weights[:, None])[:, 0], atol=1e-5)


def test_reshuffling_moves_examples_and_neither_the_loss_nor_the_optimum():
    ours, dealt = (problem(split, 6, seed=0) for split in ("by user", "reshuffled"))
    assert (ours.linear.features != dealt.linear.features).any()
    np.testing.assert_array_equal(ours.train.starts, dealt.train.starts)
    optimum = ours.optimum()
    assert np.abs(ours.linear.gradient(optimum[:, None])).max() < 1e-10
    np.testing.assert_allclose(dealt.optimum(), optimum, atol=1e-6)
    assert ours.excess(optimum, optimum) == 0
    assert ours.excess(np.zeros(FEATURES), optimum) == pytest.approx(1)


def test_fsvrg_approaches_the_optimum_from_round_to_round():
    series = optimise(way="FSVRG", split="reshuffled", users=6, rounds=3, seed=0)
    assert series["excess 5"][0] == pytest.approx(1)
    assert series["excess 5"][-1] < 0.6
    assert {len(values) for name, values in series.items() if name != "least"} == {4}


def test_a_comparison_measures_ten_times_for_every_value_tried():
    series = compare(task="digits", way="Mime, momentum", data=None, rounds=10, seed=0)
    values = WAYS["Mime, momentum"].values
    assert len(series) == 2 * len(values)
    assert {len(numbers) for name, numbers in series.items() if name.startswith("accuracy")} == {10}
    assert {len(numbers) for name, numbers in series.items() if name.startswith("loss")} == {1}


def test_short_lines_are_those_of_roles_that_say_enough(tmp_path):
    file = tmp_path / "shakespeare" / "clients.jsonl"
    file.parent.mkdir()
    said = {"HAMLET": ["to be or not to be"] * 100, "GHOST": ["mark me"], "HORATIO": ["season your admiration"] * 100}
    file.write_text("\n".join(json.dumps({"client": role, "lines": lines}) for role, lines in said.items()))
    users = short_lines(tmp_path)
    assert users.clients == ("HAMLET", "HORATIO")
    assert users.sizes.tolist() == [WINDOWS, WINDOWS]
    model = Model(small_lstm())
    assert model.schema.size == 25_514
    batch = {name: torch.from_numpy(array) for name, array in users.shard(0).items()}
    assert batch["x"].shape == (WINDOWS, LENGTH)
    loss, _ = model.loss(model.tensors(torch.zeros(model.schema.size)), batch, torch.ones(WINDOWS))
    assert loss.item() == pytest.approx(np.log(90), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["client-drift", "drift-on-users", "federated-optimization"])
def test_a_quick_study_gives_tables_and_plots(tmp_path, name):
    findings = find(name).find(Trials(tmp_path, seeds=[0], quick=True))
    assert findings.plots
    assert all(len(row) == len(table.columns) for table in findings.tables for row in table.rows)
