"""Several tasks of one population in the twin: they draw from the same devices, and pacing counts them together."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.rules.pacing import Demand, together
from simulator.errors import ForecastError
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.devices import DAY_S
from simulator.forecast.forecast import forecast
from simulator.forecast.twin import Twin

CONFIG = ForecastConfig(devices=500, goal=10, example_s=10.0, reporting_deadline_s=7200.0, step_s=10.0)
TASK = {"goal": 10, "example_s": 10.0, "reporting_deadline_s": 7200.0}
HALF_A_DAY_S = DAY_S / 2


def test_demand_of_tasks_is_their_sum_at_the_pace_of_both():
    both = together([Demand(30, 50.0, 100.0, 20.0), Demand(10, 5.0, 50.0, 20.0)])
    assert both == Demand(40, 5.0, pytest.approx(40 / (30 / 100 + 10 / 50)), 20.0)
    assert together([]) is None


def test_equal_tasks_share_devices_evenly_and_none_works_for_both():
    alone = Twin(CONFIG).run(seconds=HALF_A_DAY_S)
    twin = Twin(CONFIG, beside=[CONFIG.beside(TASK)])
    at_work = []

    def look(hour):
        first, second = (set(task._open) for task in twin.tasks)
        at_work.append(len(first | second))
        assert not first & second

    twin.run(look, HALF_A_DAY_S)
    assert max(at_work) > 13
    counts = [len(task.course.rounds) for task in twin.tasks]
    assert counts[0] == pytest.approx(counts[1], rel=0.3)
    assert sum(counts) > len(alone.rounds)


def test_device_that_only_one_task_can_use_works_for_that_one():
    choosy = CONFIG.beside(TASK | {"min_examples": 128})
    twin = Twin(CONFIG, beside=[choosy])
    twin.run(seconds=HALF_A_DAY_S)
    first, second = twin.tasks
    kept_out = second.devices.obstacle > 0
    assert kept_out.any()
    assert not second.course.took_part[kept_out].any()
    assert first.course.took_part[kept_out].any()
    assert np.array_equal(first.devices.slow, second.devices.slow)


def test_forecast_has_a_part_for_each_task_and_visits_of_all():
    found = forecast(CONFIG, beside=[CONFIG.beside(TASK | {"goal": 5})])
    (other,) = found.beside
    assert other.check_ins == found.check_ins
    assert other.rounds > 0
    assert other.reports == other.assignments["reported"] != found.reports


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"devices": 9}, "devices is of the population"),
        ({"goals": 9}, "there is no 'goals'"),
        ({"goal": 9, "same_cohort": True}, "a forecast does not model same_cohort, which tasks have: leave it out"),
    ],
)
def test_what_cannot_be_beside_is_refused_by_name(given, words):
    with pytest.raises(ForecastError, match=words):
        CONFIG.beside(given)


def test_task_beside_that_fills_no_round_is_refused_too():
    with pytest.raises(ForecastError, match="min_examples=100000 leaves 0 of 500"):
        forecast(CONFIG, beside=[CONFIG.beside(TASK | {"min_examples": 100_000})])
