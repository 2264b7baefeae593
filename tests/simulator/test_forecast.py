"""The twin: the coordinator's rules on a modelled population, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.errors import InvalidTask
from simulator.errors import ForecastError
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import BINS_PER_OCTAVE, DAY_S, Devices, draw_label_sets, read_trace
from simulator.forecast.twin import Twin, check_fills, forecast

PATIENT = {"goal": 50, "example_s": 10.0, "reporting_deadline_s": 7200.0, "step_s": 10.0}
"""Rounds that take an hour, so that a day has few of them, in coarse time."""
HALF_A_DAY_S = DAY_S / 2


def test_forecast_repeats_itself_and_each_assignment_ends_in_one_way():
    config = ForecastConfig(devices=500, seed=3, **PATIENT | {"goal": 10})
    course, again = (Twin(config).run(seconds=HALF_A_DAY_S) for _ in range(2))
    assert course.rounds
    assert course.rounds == again.rounds
    assert np.array_equal(course.took_part, again.took_part)
    assert course.took_part.sum() == course.reports.by_hour.sum() == course.ended["reported"]
    assert course.assigned - 13 <= course.ended.total() <= course.assigned


@pytest.mark.long
def test_windows_in_bulk_give_the_rounds_of_windows_one_by_one():
    config = ForecastConfig(devices=10_000, goal=20, example_s=3.0, reporting_deadline_s=1800.0, step_s=10.0, seed=1)
    bulk, single = (Twin(config, bulk=one).run() for one in (True, False))
    assert len(bulk.rounds) == pytest.approx(len(single.rounds), rel=0.1)
    assert bulk.check_ins.by_hour.sum() == pytest.approx(single.check_ins.by_hour.sum(), rel=0.1)
    assert apart(bulk.stays, single.stays) < 0.07


@pytest.mark.long
def test_pacing_saves_most_check_ins_for_a_quarter_of_rounds_at_most():
    config = ForecastConfig(devices=2000, goal=20, example_s=3.0, reporting_deadline_s=1800.0, step_s=10.0, seed=1)
    windows = ({"retry_max_s": 30.0}, {"retry_max_s": DAY_S})
    fixed, paced = (
        Twin(replace(config, rounds=1000, retry_min_s=5.0, **one)).run(seconds=HALF_A_DAY_S) for one in windows
    )
    assert paced.check_ins.by_hour.sum() < fixed.check_ins.by_hour.sum() / 15
    assert len(paced.rounds) > 0.75 * len(fixed.rounds)


def apart(some, others):
    """The greatest distance between the distributions of two counters."""
    bins = sorted(some | others)
    shares = [np.cumsum([one[stay] for stay in bins]) / one.total() for one in (some, others)]
    return np.abs(shares[0] - shares[1]).max()


def test_devices_that_no_rule_lets_in_never_take_part():
    config = ForecastConfig(devices=300, unmetered=0.5, needs_unmetered=True, min_examples=64, **PATIENT | {"goal": 5})
    twin = Twin(config)
    course = twin.run(seconds=HALF_A_DAY_S)
    kept_out = twin.devices.obstacle > 0
    assert set(twin.devices.obstacles) == {"", "examples", "conditions"}
    assert not course.took_part[kept_out].any()
    assert course.took_part[~kept_out].any()


def test_device_can_come_from_the_start_of_its_next_stretch():
    devices = Devices.drawn(ForecastConfig(devices=1000)).stretches
    rows = np.arange(1000)
    starts = devices.next_stretch(rows, DAY_S)
    assert (starts > DAY_S).all()
    assert all(devices.can_until(rows[one : one + 1], starts[one] + 1.0)[0] > starts[one] for one in range(1000))


def test_device_that_took_part_rests_for_as_long_as_the_task_asks():
    course = Twin(ForecastConfig(devices=300, min_separation_s=DAY_S, **PATIENT | {"goal": 10})).run()
    assert course.took_part.max() == 1


def test_device_that_reports_is_unreliable_no_more():
    config = ForecastConfig(devices=500, **PATIENT)
    twin = Twin(config)
    (task,) = twin.tasks
    task._unreliable = dict.fromkeys(range(500), 10**6)
    twin.run(seconds=HALF_A_DAY_S)
    reported = set(np.flatnonzero(task.course.took_part).tolist())
    assert len(reported) > config.goal
    assert [row for row in reported if task._unreliable.get(row, 0) > 10**5] == []  # unless it failed again since


def test_buffered_rounds_take_reports_of_earlier_models():
    config = ForecastConfig(devices=500, concurrency=20, max_staleness=1, **PATIENT | {"goal": 5})
    course = Twin(config).run(seconds=HALF_A_DAY_S)
    assert len(course.rounds) > 10
    assert all(len(one.devices) == 5 for one in course.rounds)
    assert course.ended["too-stale"] > 0
    assert course.abandoned == {}


def test_windows_keep_to_the_bounds_of_the_coordinator():
    config = ForecastConfig(devices=300, retry_min_s=600.0, retry_max_s=600.0, **PATIENT | {"goal": 5})
    course = Twin(config).run(seconds=HALF_A_DAY_S)
    assert set(course.stays) == {int(BINS_PER_OCTAVE * np.log2(600.0))}


def test_task_whose_attempts_fail_is_paused_as_on_a_coordinator():
    # Nearly every device needs longer than rounds wait, but for the few that the check before a day must let pass.
    config = ForecastConfig(devices=2000, goal=20, example_s=40.0, step_s=10.0, max_attempts=3)
    course = Twin(config).run()
    assert course.paused is not None
    assert course.paused[1] == "too-few-reports"
    assert course.abandoned["too-few-reports"] == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"devices": 99}, "devices=99 leaves 99 of 99 devices"),
        ({"min_examples": 100_000}, "min_examples=100000 leaves 0 of 1,000 devices"),
        ({"unmetered": 0.05, "needs_unmetered": True}, "needs_unmetered=True leaves"),
        ({"example_s": 90.0}, "reporting_deadline_s=600.0 leaves"),
        ({"charging_s": 60.0}, "charging_s=60.0 leaves"),
        ({"charges": 0.1}, "at the best hour of a day"),
        ({"retry_min_s": 600.0}, "retry_min_s=600.0 leaves 11 of 1,000 devices, who wait at the same time, for 30 s"),
        ({"where": "region = eu"}, "where=region = eu leaves 0 of 1,000 devices (1,000 tell no labels)"),
        (
            {"where": "a = b", "labels": ("a=b:0.02", "c=d:1")},
            "devices (0 tell no labels), and a round counts from 100",
        ),
        ({"drop_out": 0.9}, "drop_out=0.9 leaves 44 reports of a round of 130 devices at best"),
    ],
)
def test_profile_that_fills_no_round_is_refused_with_what_starves_it(settings, words):
    config = ForecastConfig(**{"devices": 1000} | settings)
    with pytest.raises(ForecastError) as refused:
        check_fills(config, Devices.drawn(config))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"labels": ("region=eu:1.5",)}, "label region=eu: its share must be a number from 0 to 1, not 1.5"),
        ({"labels": ("region=eu",)}, "label 'region=eu' is not like region=eu:0.3"),
        ({"labels": ("a=b:0.6", "a=c:0.5")}, "label a: its shares are 1.1 together, more than 1"),
    ],
)
def test_labels_that_no_devices_can_draw_are_refused(settings, words):
    with pytest.raises(ForecastError, match=words):
        ForecastConfig(**settings)


def test_only_matching_devices_take_part_and_silent_ones_count_apart():
    labels = ("region=eu:0.3", "region=us:0.5", "app_version=3.10:0.5")
    config = ForecastConfig(devices=2000, labels=labels, **PATIENT | {"goal": 5})
    sets, own = draw_label_sets(config.shares, 2000, config.seed)
    told = [sets[index] for index in own]
    wanted = np.array([one.get("region") == "eu" and one.get("app_version") == "3.10" for one in told])
    twin = Twin(replace(config, where="app_version >= 3.9 and region in (eu, uk)"))
    course = twin.run(seconds=HALF_A_DAY_S)
    assert (twin.devices.matching, twin.devices.untold) == (wanted.sum(), told.count({}))
    assert abs(wanted.sum() - 300) < 60
    assert abs(told.count({}) - 200) < 60
    assert not course.took_part[~wanted].any()
    assert course.took_part[wanted].any()
    assert course.turned_away["labels"] > 0
    plain = Devices.drawn(replace(config, labels=()))
    assert np.array_equal(plain.work_s, twin.devices.work_s)


def test_minimum_above_the_goal_is_refused():
    with pytest.raises(InvalidTask, match=r"minimum must be from 1 to the goal, 10, not 11"):
        ForecastConfig(goal=10, minimum=11)


def test_answers_say_when_the_rounds_asked_for_are_done():
    hours = []
    found = forecast(ForecastConfig(devices=500, rounds=5, **PATIENT | {"goal": 10}), hours.append)
    assert found.rounds >= 5
    assert 0 < found.done_at_h < 24
    assert sum(found.rounds_a_day) == found.rounds
    assert sum(found.check_ins_by_hour) == found.check_ins
    assert found.reports == found.assignments["reported"]
    assert hours == list(range(1, 25))


TRACE = "device,start_s,end_s\na,0,3600\nb,7200,10800\na,50000,60000\n"


def test_traced_devices_come_in_their_stretches_and_again_every_day(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    traced = read_trace(path, 4, seed=0)
    rows = np.arange(4)
    of_a = traced.can_until(rows, 60.0) > 0
    assert of_a.sum() == 2
    assert traced.can_until(rows, 60.0)[of_a] == pytest.approx(3600.0)
    assert traced.can_until(rows, DAY_S + 8000.0)[~of_a] == pytest.approx(DAY_S + 10800.0)
    assert traced.next_stretch(rows, 60.0)[of_a] == pytest.approx(50_000.0)
    assert traced.next_stretch(rows, 55_000.0)[of_a] == pytest.approx(DAY_S)
    assert traced.next_stretch(rows, 60.0)[~of_a] == pytest.approx(7200.0)
    assert traced.longest_s()[of_a] == pytest.approx(10_000.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: the columns are device,start_s,end_s"),
        ("device,start_s,end_s\n", "has no stretch"),
        (f"{TRACE}c,1\n", "line 5: 'c,1' is not a device and two times"),
        (f"{TRACE}c,1,x\n", "line 5: 'c,1,x' is not a device and two times"),
        (f"{TRACE}c,20,10\n", "line 5: a stretch from 20 to 10"),
        (f"{TRACE}c,-1,10\n", "line 5: a stretch from -1 to 10"),
        (f"{TRACE}c,0,inf\n", "line 5: a stretch from 0 to inf"),
        (f"{TRACE}a,3000,4000\n", "line 5: it overlaps the stretch of line 2"),
    ],
)
def test_impossible_trace_is_refused_with_its_line(tmp_path, text, words):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ForecastError) as refused:
        read_trace(path, 10, seed=0)
    assert words in str(refused.value)


def test_trace_that_fills_no_round_is_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("device,start_s,end_s\n" + "".join(f"{name},{name},{name + 5}\n" for name in range(50)))
    config = ForecastConfig(devices=50, goal=10, trace=path)
    with pytest.raises(
        ForecastError, match=r"no round can fill: trace=.*trace.csv leaves \d of 50 devices, the others"
    ):
        check_fills(config, Devices.drawn(config))


def test_rounds_happen_while_traced_devices_can_come(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("device,start_s,end_s\n" + "".join(f"{name},36000,72000\n" for name in range(50)))
    found = forecast(ForecastConfig(devices=100, trace=path, **PATIENT | {"goal": 10}))
    hours = [hour for hour, count in enumerate(found.rounds_by_hour) if count]
    assert 10 <= min(hours) <= max(hours) <= 20
    assert found.never_by_zone == {}


def test_slow_devices_take_part_less_where_rounds_do_not_wait_for_them():
    config = ForecastConfig(devices=1000, goal=20, example_s=10.0, speed_spread=1.0, over_selection=2.0, step_s=10.0)
    found = forecast(config)
    assert found.never_by_speed["slowest"] > found.never_by_speed["fastest"] + 0.1
    assert found.never_took_part == pytest.approx(np.mean(list(found.never_by_zone.values())), abs=0.05)
    assert 0 < found.phone.cpu_s < found.phone.cpu_s_p99
