"""Secure rounds of the twin: exchanges end when all have answered or the time is up, and too few make no sum."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.errors import InvalidTask
from coordinator.rules.task_settings import Secagg
from secagg.session import SessionPhase
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import Exchanges
from simulator.forecast.devices import DAY_S
from simulator.forecast.twin import Twin

SECURE = {
    "devices": 500,
    "goal": 20,
    "minimum": 15,
    "example_s": 5.0,
    "reporting_deadline_s": 7200.0,
    "secagg_phase_s": 60.0,
    "step_s": 5.0,
}


def exchanges(goal=10, minimum=8):
    policy = ForecastConfig(goal=goal, minimum=minimum, over_selection=1.2, secagg_phase_s=30.0).task.policy
    opened = Exchanges(policy, Secagg(phase_s=30.0), deadline=1000.0)
    opened.join(list(range(12)))
    return opened


def answer(opened, rows, now):
    for row in rows:
        opened.take(row, now)


def test_exchanges_begin_a_phase_after_the_goal_or_after_training():
    opened = exchanges()
    answer(opened, range(9), 100.0)
    assert not opened.ends(849.0)
    assert opened.ends(850.0)  # five phases before the deadline
    answer(opened, [9], 100.0)
    assert not opened.ends(129.0)
    assert opened.ends(130.0)
    assert opened.go_on(130.0) == list(range(10))
    assert opened.phase is SessionPhase.SHARING


def test_exchange_ends_at_once_when_all_have_answered_or_left():
    opened = exchanges()
    answer(opened, range(10), 100.0)
    opened.go_on(130.0)
    answer(opened, range(9), 131.0)
    assert not opened.ends(131.0)
    opened.leave(9, 131.0, lost=True)
    assert opened.ends(131.0)


def test_masked_reports_stay_in_the_sum_though_their_devices_vanish():
    opened = exchanges()
    answer(opened, range(10), 0.0)
    while opened.phase is not SessionPhase.CONFIRMING:
        answer(opened, opened.go_on(1.0), 1.0)
    opened.leave(0, 2.0, lost=True)
    assert opened.masked == frozenset(range(10))
    assert not opened.short


def test_sum_fails_where_too_few_are_left_to_count_or_to_reveal():
    opened = exchanges()
    answer(opened, range(10), 0.0)
    opened.go_on(1.0)
    for row in (0, 1):
        opened.leave(row, 2.0, lost=True)
    assert not opened.short
    opened.leave(2, 2.0, lost=True)
    assert opened.short


def test_secure_rounds_take_longer_than_clear_ones_by_their_exchanges():
    slow = Twin(ForecastConfig(**SECURE, exchange_s=30.0, speed_spread=0.0, exchange_drop_out=0.0)).run()
    quick = Twin(ForecastConfig(**SECURE, exchange_s=0.0, speed_spread=0.0, exchange_drop_out=0.0)).run()
    lasted = [np.median([one.ended - one.drawn for one in course.rounds]) for course in (slow, quick)]
    assert lasted[0] - lasted[1] == pytest.approx(5 * 30.0, abs=60.0)
    assert min(len(one.devices) for one in quick.rounds) >= 15


def test_devices_that_vanish_in_exchanges_cost_reports_and_rounds():
    configs = (ForecastConfig(**SECURE, exchange_drop_out=chance) for chance in (0.0, 0.08))
    steady, shaky = (Twin(config).run(seconds=DAY_S / 2) for config in configs)
    assert shaky.ended["lost"] > 2 * steady.ended["lost"]
    assert np.mean([len(one.devices) for one in shaky.rounds]) < np.mean([len(one.devices) for one in steady.rounds])
    assert shaky.abandoned["devices-lost"] + shaky.abandoned["too-few-reports"] > 0
    assert shaky.took_part.sum() == shaky.ended["reported"] == sum(len(one.devices) for one in shaky.rounds)


def test_secure_policy_that_cannot_be_is_refused():
    with pytest.raises(InvalidTask, match="reporting_deadline_s"):
        ForecastConfig(secagg_phase_s=200.0, reporting_deadline_s=900.0)
    with pytest.raises(InvalidTask, match=r"secagg|buffered"):
        ForecastConfig(secagg_phase_s=10.0, concurrency=100)
