"""The twin against real fleets, in small: real coordinators, light devices, and twins of the same devices."""

from __future__ import annotations

import pytest

from benchmarks.forecast_fleet import TOLERANCES, run
from benchmarks.options import ForecastFleetOptions


@pytest.mark.long
def test_fleets_come_about_as_often_as_their_twins_under_each_profile():
    found = run(ForecastFleetOptions(devices=20, seconds=45.0), lambda words: None)
    assert [(side.profile, side.side) for side in found.sides] == [
        (profile, side) for profile in ("always there", "short days", "slow") for side in ("fleet", "twins' mean")
    ]
    for fleet, twins in zip(found.sides[::2], found.sides[1::2], strict=True):
        assert fleet.check_ins == pytest.approx(twins.check_ins, rel=0.4)
        assert 0 < fleet.assigned <= 3 * twins.assigned
    assert found.sides[0].rounds > 0
    assert found.sides[0].reports == 2 * found.sides[0].rounds
    assert all(set(by_name) == set(TOLERANCES) for by_name in found.apart.values())
    assert found.cores_used["devices"] > 0
