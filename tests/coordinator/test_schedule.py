"""A task with a server schedule: goals and server learning rates change from round to round."""

import numpy as np
import pytest

from coordinator.errors import InvalidTask
from coordinator.rules.task_settings import Secagg, TaskSettings
from fedcore.schedule import ServerSchedule
from tests.coordinator.bundles import START, make_bundle
from tests.coordinator.conftest import states

SCHEDULE = ServerSchedule(warmup_rounds=2, scaling="linear", reference_cohort=2, double_every=2, largest_cohort=3)


def settings(**changes):
    return TaskSettings(**{"population": "p", "goal": 10, "rounds": 100} | changes)


def test_goal_and_learning_rate_follow_the_schedule(store, register, desk, tmp_path):
    task = register(make_bundle(tmp_path / "b"), goal=2, rounds=3, over_selection=1.0, schedule=SCHEDULE)
    for number in range(3):
        given = desk.assign(*(f"{number}-{name}" for name in "abc"[: 2 if number < 2 else 3]))
        for one in given:
            desk.report(one, [1, 0, 0, 0])
        desk.pass_time(1)
    assert states(store, task) == [(number, 1, "committed", "") for number in (1, 2, 3)]
    assert [one.reported for one in store.rounds(task)] == [2, 2, 3]
    moved = 0.5 + 1 + 1.5  # warm-up in round 1; in round 3 three reports where two are the reference
    np.testing.assert_allclose(store.checkpoint(task)["params"], START + np.array([moved, 0, 0, 0]), rtol=1e-6)
    assert store.task(task).settings.schedule == SCHEDULE


def test_the_minimum_is_the_same_share_of_every_goal():
    task = settings(minimum=7, schedule=ServerSchedule(double_every=5, largest_cohort=35))
    assert [task.in_round(number).policy.goal for number in (1, 5, 6, 11, 90)] == [10, 10, 20, 35, 35]
    assert [task.in_round(number).policy.minimum for number in (1, 6, 11)] == [7, 14, 25]
    assert settings().in_round(50) == settings()
    assert task.largest_goal == 35


def test_a_release_bounds_the_smallest_sum_of_any_round():
    growing = ServerSchedule(double_every=1, largest_cohort=1000)
    fixed, grown = (
        settings(goal=40, secagg=Secagg(group_size=50), schedule=one) for one in (ServerSchedule(), growing)
    )
    every = [grown.in_round(number).sum_bounds.min_sum for number in range(1, 10)]
    assert grown.sum_bounds.min_sum <= min(every) <= fixed.sum_bounds.min_sum


def test_a_cohort_that_no_column_holds_is_refused():
    with pytest.raises(InvalidTask, match="largest_cohort"):
        settings(schedule=ServerSchedule(double_every=1, largest_cohort=2**31))
