"""When devices come back."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from coordinator.rules.pacing import HOUR_S, Demand, Pace, drawn, idle_window, observe, window
from fedcore.wire.messages import RetryWindow

BOUNDS = RetryWindow(5.0, 86_400.0)
DEMAND = Demand(cohort=100, opens_in_s=300.0, every_s=600.0, gather_s=20.0)


def send_away(pace, times, demand=DEMAND):
    found = []
    for _ in range(times):
        pace, one = window(pace, demand, BOUNDS)
        found.append(one)
    return pace, found


def test_devices_of_a_small_population_return_for_the_next_selection():
    _, found = send_away(Pace(0.0), 160)
    assert set(found) == {RetryWindow(290.0, 310.0)}


def test_devices_beyond_a_rounds_places_are_spread_over_later_rounds():
    pace, found = send_away(Pace(0.0), 160 + 1600)
    middles = [(one.min_s + one.max_s) / 2 for one in found[160:]]
    assert middles == sorted(middles)
    # 1600 devices at 160 in ten minutes: the last is put off by 100 minutes.
    assert middles[-1] == pytest.approx(300 + 6000, rel=0.01)
    assert pace.queued == pytest.approx(1600)


def test_draw_frees_the_places_of_the_next_round():
    pace, _ = send_away(Pace(0.0), 160)
    assert window(drawn(pace), DEMAND, BOUNDS)[1] == RetryWindow(290.0, 310.0)
    assert window(replace(pace, queued=1.0), DEMAND, BOUNDS)[1].min_s > 200


def test_places_of_an_opening_without_a_draw_come_free():
    pace, _ = send_away(Pace(0.0), 160)
    open_now = replace(DEMAND, opens_in_s=0.0)
    assert observe(pace, 0, 300.0, DEMAND).booked == 160
    late = observe(pace, 0, 320.0, open_now)
    assert late.booked == pytest.approx(160 * math.exp(-1))
    assert window(late, open_now, BOUNDS)[1] == RetryWindow(5.0, 25.0)


def test_queue_moves_as_time_passes_and_ends():
    pace, _ = send_away(Pace(0.0), 160 + 320)
    assert observe(pace, 0, 600.0, DEMAND).queued == pytest.approx(160)
    assert observe(pace, 0, 86_400.0, DEMAND).queued == 0


def test_hours_in_which_few_of_the_due_come_get_more_of_them():
    pace, _ = send_away(Pace(0.0), 20_000)
    for _ in range(30):
        # Of those due in the first hour of the day a half come; in the others, all.
        for hour in range(24):
            start = pace.at
            pace = replace(pace, queued=20_000.0)
            due = 960 / pace.showing[hour]
            pace = observe(pace, due * (0.5 if hour == 0 else 1.0), start + HOUR_S, DEMAND)
    assert pace.showing[0] == pytest.approx(0.5, abs=0.05)
    assert pace.showing[1:] == pytest.approx((1.0,) * 23, abs=0.05)
    full = replace(pace, queued=1920.0)
    _, found = window(replace(full, booked=160.0, opening=full.at + 300), DEMAND, BOUNDS)
    assert (found.min_s + found.max_s) / 2 == pytest.approx(300 + HOUR_S, rel=0.02)


def test_devices_that_nobody_needs_put_nobody_else_off():
    pace, _ = send_away(Pace(0.0), 160 + 16)
    alone = window(pace, DEMAND, BOUNDS)[1]
    for _ in range(1000):
        pace, _ = idle_window(pace, BOUNDS)
    assert window(pace, DEMAND, BOUNDS)[1] == alone


def test_hour_that_saw_hardly_anybody_teaches_nothing():
    assert observe(Pace(0.0, queued=1.0), 50, HOUR_S, DEMAND).showing == (1.0,) * 24


def test_devices_that_nobody_needs_stay_away_the_longer_the_more_they_are():
    _, few = idle_window(Pace(0.0), BOUNDS)
    _, many = idle_window(Pace(0.0, idle=36_000.0), BOUNDS)
    assert (few.min_s, few.max_s) == (45.0, 75.0)
    assert many.max_s == pytest.approx(1.25 * 3600, rel=0.01)


@given(
    st.floats(0, 1e7), st.integers(1, 10**6), st.floats(0, 1e6), st.floats(1, 1e6), st.floats(0, 1e5), st.floats(0, 1e5)
)
def test_every_window_is_within_the_bounds(queued, cohort, opens_in_s, every_s, least, width):
    bounds = RetryWindow(least, least + width)
    demand = Demand(cohort, opens_in_s, every_s, 20.0)
    for pace in (Pace(0.0, queued=queued), Pace(0.0, queued=queued, booked=2.0 * cohort, opening=1e9)):
        for _, found in (window(pace, demand, bounds), idle_window(pace, bounds)):
            assert bounds.min_s <= found.min_s <= found.max_s <= bounds.max_s
