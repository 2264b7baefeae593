"""Server schedules: warm-up, scaling by the cohort, and cohorts that double."""

import msgspec
import pytest

from fedcore.errors import ScheduleError
from fedcore.schedule import ServerSchedule


def test_the_default_changes_nothing():
    schedule = ServerSchedule()
    assert {schedule.lr_scale(number, cohort) for number in (1, 7, 10**6) for cohort in (1, 900)} == {1.0}
    assert [schedule.cohort(number, 13) for number in (1, 50, 10**9)] == [13] * 3


def test_the_learning_rate_warms_up_in_even_steps():
    schedule = ServerSchedule(warmup_rounds=4)
    assert [schedule.lr_scale(number, 10) for number in range(1, 7)] == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize(("scaling", "factors"), [("none", [1, 1, 1]), ("sqrt", [0.5, 1, 3]), ("linear", [0.25, 1, 9])])
def test_the_learning_rate_grows_with_the_cohort(scaling, factors):
    schedule = ServerSchedule(scaling=scaling, reference_cohort=20)
    assert [schedule.lr_scale(5, cohort) for cohort in (5, 20, 180)] == factors
    warming = ServerSchedule(scaling=scaling, reference_cohort=20, warmup_rounds=10)
    assert warming.lr_scale(5, 180) == factors[2] / 2


def test_the_cohort_doubles_every_few_rounds_up_to_a_cap():
    schedule = ServerSchedule(double_every=3, largest_cohort=70)
    assert [schedule.cohort(number, 10) for number in range(1, 14)] == [10] * 3 + [20] * 3 + [40] * 3 + [70] * 4
    assert schedule.cohort(10**15, 10) == 70
    assert schedule.cohort(100, 90) == 90


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"scaling": "sqrt"}, "scaling sqrt needs reference_cohort"),
        ({"double_every": 5}, "double_every needs largest_cohort"),
        ({"warmup_rounds": -1}, "warmup_rounds must be a whole number from 0 to .*, not -1"),
        ({"scaling": "cubic"}, "scaling must be one of none, sqrt, linear, not 'cubic'"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_name(wrong, says):
    with pytest.raises(ScheduleError, match=says):
        ServerSchedule(**wrong)


def test_a_schedule_survives_json():
    schedule = ServerSchedule(warmup_rounds=4, double_every=3, largest_cohort=70)
    assert msgspec.json.decode(msgspec.json.encode(schedule), type=ServerSchedule) == schedule
