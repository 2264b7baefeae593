"""The twin: the coordinator's rules on a modelled population, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.errors import ForecastError
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.devices import DAY_S, Devices
from simulator.forecast.twin import Twin


def test_forecast_is_the_same_with_the_same_seed():
    config = ForecastConfig(devices=500, goal=10, seed=3)
    first, again = Twin(config).run(), Twin(config).run()
    assert first.times
    assert first.times == again.times
    assert np.array_equal(first.took_part, again.took_part)


def test_windows_in_bulk_give_the_rounds_of_windows_one_by_one():
    config = ForecastConfig(devices=10_000, goal=100, example_s=10.0, reporting_deadline_s=3600.0)
    bulk, single = (Twin(config, bulk=one).run() for one in (True, False))
    assert len(bulk.times) == pytest.approx(len(single.times), rel=0.1, abs=2)
    assert bulk.arrivals.sum() == pytest.approx(single.arrivals.sum(), rel=0.1)


def test_devices_that_no_rule_lets_in_never_take_part():
    twin = Twin(ForecastConfig(devices=1000, goal=10, unmetered=0.5, min_examples=64))
    course = twin.run()
    kept_out = twin.devices.obstacle > 0
    assert set(twin.devices.obstacles) == {"", "examples", "conditions"}
    assert not course.took_part[kept_out].any()
    assert course.took_part[~kept_out].any()


def test_device_can_come_from_the_start_of_its_next_stretch():
    devices = Devices.drawn(ForecastConfig(devices=1000))
    rows = np.arange(1000)
    starts = devices.next_stretch(rows, DAY_S)
    assert (starts > DAY_S).all()
    assert all(devices.can_until(rows[one : one + 1], starts[one] + 1.0)[0] > starts[one] for one in range(1000))


def test_every_reported_assignment_is_of_one_device():
    course = Twin(ForecastConfig(devices=500, goal=10)).run()
    assert course.took_part.sum() == course.reports.sum()
    assert course.took_part.sum() + course.wasted <= course.assigned


def test_minimum_above_the_goal_is_refused():
    with pytest.raises(ForecastError, match=r"minimum must be at most goal \(10\), not 11"):
        ForecastConfig(goal=10, minimum=11)
