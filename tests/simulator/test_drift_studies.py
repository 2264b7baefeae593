"""Studies of client drift: what their trials measure."""

import pytest

from simulator.studies import find
from simulator.studies.client_drift import CLIENTS, descend
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["client-drift"])
def test_a_quick_study_gives_tables_and_plots(tmp_path, name):
    findings = find(name).find(Trials(tmp_path, seeds=[0], quick=True))
    assert findings.plots
    assert all(len(row) == len(table.columns) for table in findings.tables for row in table.rows)
