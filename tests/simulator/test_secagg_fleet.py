"""A fleet that is killed in the middle of secure aggregations. A hundred devices: `muster bench secagg_fleet`."""

import pytest

from benchmarks import fleet_training
from benchmarks.options import SecaggFleetOptions
from benchmarks.secagg_fleet import run

pytestmark = pytest.mark.promise("A secure round has the exact sum, whoever dies, or none and no share was revealed")


def test_sums_of_a_killed_fleet_are_exact_and_nothing_else_is_learnt(coordinators, monkeypatch, capsys):
    monkeypatch.setattr(fleet_training, "local_coordinator", coordinators.local)
    result = run(SecaggFleetOptions(devices=10, rounds=1, seed=9, phase_s=4.0, lost=1), lambda *_: None)
    with capsys.disabled():
        print(f"\nsecure fleet: {result.deaths}, {result.failed} in {result.seconds:.0f} s")
    assert result.sound, result
    assert result.committed == 1
    assert result.deaths == {"before M5": 1, "before M7": 1}
    assert result.sought == 2 * result.uploads > 0
    assert sum(result.failed.values()) >= 1
