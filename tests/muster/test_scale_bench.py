"""The benchmark of replicas in small: real coordinators on a real PostgreSQL server, and real check-ins."""

from __future__ import annotations

import pytest

from benchmarks.postgresql import binaries
from benchmarks.runner import ScaleOptions
from benchmarks.scale import run


@pytest.mark.skipif(binaries() is None, reason="needs PostgreSQL's programs")
def test_replicas_are_measured_by_the_check_ins_that_they_answer(coordinators, monkeypatch):
    monkeypatch.setattr("benchmarks.scale.local_coordinator", coordinators.local)
    said: list[str] = []
    found = run(ScaleOptions(devices=16, blocks=1, seconds=0.2, rounds=1, reports=20), said.append)
    # Two blocks of 0.2 CPU seconds are that many check-ins, at what each costs.
    spent_us = 0.2e6 / found["alone_us"] + 0.2e6 / found["follower_us"]
    assert found["check_ins"] == pytest.approx(spent_us, rel=0.5)
    # A replica that asked the driver about every device would cost several times as much.
    assert 0.3 < found["checkin_ratio"] < 2.5
    assert found["checkin_ratio"] == pytest.approx(found["follower_us"] / found["alone_us"])
    # A difference of two turns, a few microseconds: on a busy machine it may come out a little below zero.
    assert -found["alone_us"] / 100 < found["heard_us"] < found["alone_us"] / 5
    assert found["driver_us"] == pytest.approx(found["heard_us"] + found["heard_ms"] * 1e-3 * found["follower_us"] / 2)
    assert found["reports"]["reports"] >= 20
    # What the driver takes at rest is taken off, and 20 reports cost it less than that varies.
    alone_us = found["reports"]["report_alone_us"]
    assert -alone_us / 10 < found["reports"]["report_driver_us"] < 2 * alone_us
    assert found["reports"]["report_ratio"] < 4
    assert {"checkin_ratio", "checkin_driver_share"} < set(found["targets"])
    assert {"check-ins: pair 1 of 1", "reports: pair 1 of 1"} < set(said)
