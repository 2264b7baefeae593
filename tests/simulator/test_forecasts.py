"""Forecasts: next to runs, of secure rounds, and of training."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.errors import InvalidTask
from coordinator.rules.pacing import Demand, together
from coordinator.rules.task_settings import Secagg
from research.forecasts import SLOW_DIGITS, users_of
from secagg.session import SessionPhase
from simulator.configuration import SimulationConfig
from simulator.errors import ForecastError
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import DAY_S, CommittedRound, Exchanges
from simulator.forecast.training import accuracy_over_time
from simulator.forecast.twin import Twin, forecast

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


WHOLE = {"client_lr": 0.5, "batch_size": 100, "epochs": 1}
"""A step over all examples of a device, so that one report is the next if the model is the same."""


def in_round(number, devices, behind):
    return CommittedRound(3600.0 * number, 3600.0 * number, 3600.0 * (number + 1), devices, behind)


def losses(rounds, algorithm="fedbuff", **settings):
    """The loss of training in each round: that of the models from which the reports start."""
    found = []
    config = SimulationConfig(
        model="logreg", dataset="digits", rounds=len(rounds), algorithm=algorithm, settings=WHOLE | settings
    )
    accuracy = accuracy_over_time(config, rounds, lambda number, point: found.append(point["train.loss"]))
    assert accuracy[-1][0] == len(rounds)
    return found


def test_old_reports_start_from_the_model_that_their_devices_were_given():
    devices = (0, 1, 2)
    fresh = losses([in_round(number, devices, (0, 0, 0)) for number in range(3)])
    old = losses([in_round(0, devices, (0, 0, 0)), in_round(1, devices, (1, 1, 1)), in_round(2, devices, (0, 0, 0))])
    assert fresh[2] < fresh[1] < fresh[0]
    assert old[1] == pytest.approx(old[0])
    assert fresh[2] < old[2] < fresh[1]


def test_fedbuff_moves_less_for_old_reports_and_fedavg_as_far():
    rounds = [in_round(0, (0, 1), (0, 0)), in_round(1, (0, 1), (1, 1)), in_round(2, (0, 1), (0, 0))]
    buffered = losses(rounds, weighting="uniform")
    averaged = losses(rounds, "fedavg", weighting="uniform")
    assert buffered[:2] == pytest.approx(averaged[:2])
    assert averaged[2] < buffered[2] < buffered[1]


def test_old_and_fresh_reports_of_a_round_count_by_age_and_examples():
    # Twice the same report is that report, whatever the weights; a fresh one beside it moves the model on.
    twice = losses([in_round(0, (0, 1), (0, 0)), in_round(1, (0, 1), (0, 1)), in_round(2, (0, 1), (0, 0))], "fedavg")
    fresh = losses([in_round(number, (0, 1), (0, 0)) for number in range(3)], "fedavg")
    assert twice[0] == pytest.approx(fresh[0])
    assert fresh[2] != pytest.approx(twice[2])
    assert twice[2] < twice[0]


def test_algorithm_that_cannot_take_old_reports_is_refused_by_name():
    rounds = [in_round(0, (0, 1), (0, 0)), in_round(1, (0, 1), (0, 1))]
    config = SimulationConfig(model="logreg", dataset="digits", rounds=2, algorithm="fedadam")
    with pytest.raises(ForecastError, match=r"algorithm fedadam does not train with .* take fedavg or fedbuff"):
        accuracy_over_time(config, rounds, lambda number, point: None)


def test_digits_of_slow_devices_are_held_by_no_others():
    slowest = np.arange(20) >= 16
    train, test = users_of(slowest, seed=0)
    slow = {int(label) for device in range(16, 20) for label in train.shard(device)["y"]}
    others = {int(label) for device in range(16) for label in train.shard(device)["y"]}
    assert slow == set(SLOW_DIGITS)
    assert others == set(range(8))
    assert set(test.shard(1)["y"]) == set(SLOW_DIGITS)
