import random
from dataclasses import replace

import pytest

from device_runtime.conditions import Clock, Conditions, Moment, Requirements
from device_runtime.device import default_window, run_forever
from device_runtime.permission.policy import Policy
from device_runtime.session import run_session
from device_runtime.state.database import open_database
from device_runtime.state.folder import only_session
from device_runtime.state.records import Retry
from fedcore.wire.messages import Rejected, RetryWindow, encode
from tests.device_runtime.coordinator import WINDOW, answer, refusal


class Enough(Exception):
    """Ends a loop that runs for ever."""


class Time:
    """A clock that a test sets; sleeping moves it. `sleeps` are the seconds between sessions."""

    def __init__(self, most=100):
        self.wall, self.boot_s, self.boot, self.slept, self.most = 1e9, 50.0, "first", [], most

    @property
    def clock(self):
        return Clock(lambda: self.wall, lambda: self.boot_s, self.boot)

    def sleep(self, seconds):
        if len(self.slept) == self.most:
            raise Enough
        self.slept.append(seconds)
        self.wall, self.boot_s = self.wall + seconds, self.boot_s + seconds

    def reboot(self, jump_s=0.0):
        self.boot, self.boot_s, self.wall = "next", 1.0, self.wall + jump_s


class Sessions:
    """Outcomes of a loop, and how long it waited before each; the loop ends with the last."""

    def __init__(self, time, most):
        self.time, self.most, self.outcomes, self.waits, self._last = time, most, [], [], time.boot_s

    def __call__(self, outcome):
        self.outcomes.append(outcome)
        self.waits.append(self.time.boot_s - self._last)
        self._last = self.time.boot_s
        if len(self.outcomes) == self.most:
            raise Enough


def run(config, time, most):
    """So many sessions of a device that starts now."""
    sessions = Sessions(time, most)
    with pytest.raises(Enough):
        run_forever(config, sessions, sleep=time.sleep, rng=random.Random(0), clock=time.clock)
    return sessions


def reject(coordinator, times=1, window=WINDOW):
    coordinator.faults["check-in"] += [answer(encode(Rejected("no-task", window)))] * times


def test_a_device_comes_back_in_the_window_it_was_told(coordinator, config):
    reject(coordinator, 3)
    sessions = run(config, Time(), 5)
    assert [outcome.outcome for outcome in sessions.outcomes] == ["rejected"] * 3 + ["reported"] * 2
    assert sessions.waits[0] == 0
    assert all(WINDOW.min_s <= seconds <= WINDOW.max_s for seconds in sessions.waits[1:4])
    assert len(set(sessions.waits[1:4])) == 3
    assert sessions.waits[4] <= 2


def test_a_transient_error_costs_minutes_and_a_permanent_one_hours(coordinator, config):
    coordinator.faults["check-in"] = [refusal("internal"), refusal("malformed-message")]
    sessions = run(config, Time(1000), 3)
    assert [outcome.retryable for outcome in sessions.outcomes[:2]] == ["transient", "permanent"]
    assert 60 <= sessions.waits[1] <= 300
    assert 7200 <= sessions.waits[2] <= 21600
    assert default_window(sessions.outcomes[1]).min_s == 7200


def test_a_restart_does_not_shorten_the_wait(coordinator, config):
    time = Time()
    reject(coordinator, 1, RetryWindow(500.0, 600.0))
    run(config, time, 1)
    time.sleep(100)
    assert 400 <= run(config, time, 1).waits[0] <= 500


def test_another_coordinator_or_population_has_a_wait_of_its_own(coordinator, config):
    time = Time()
    reject(coordinator, 1, RetryWindow(500.0, 600.0))
    run(config, time, 1)
    assert run(replace(config, population="toasters"), time, 1).waits == [0]
    assert run(config, time, 1).waits[0] >= 500


@pytest.mark.parametrize("jump_s", [-1e8, -3600.0, 3600.0, 1e8])
def test_a_wall_clock_that_is_set_changes_no_wait(coordinator, config, jump_s):
    time = Time()
    reject(coordinator, 1, RetryWindow(500.0, 600.0))
    run(config, time, 1)
    time.wall += jump_s
    assert 500 <= run(config, time, 1).waits[0] <= 600


def test_reboot_with_a_clock_that_fell_back_never_lengthens_the_wait(coordinator, config):
    time = Time()
    reject(coordinator, 1, RetryWindow(500.0, 600.0))
    run(config, time, 1)
    time.reboot(jump_s=-1e8)
    assert 500 <= run(config, time, 1).waits[0] <= 600


def test_a_reboot_keeps_the_wait_by_the_wall_clock(coordinator, config):
    time = Time()
    reject(coordinator, 1, RetryWindow(500.0, 600.0))
    run(config, time, 1)
    time.reboot(jump_s=400.0)
    assert 100 <= run(config, time, 1).waits[0] <= 200


def test_time_asleep_counts(coordinator, config):
    time = Time()
    reject(coordinator, 1, RetryWindow(500.0, 500.0))
    nap = time.sleep

    def deep(seconds):
        nap(seconds)
        if len(time.slept) == 2:
            nap(1000)

    sessions = Sessions(time, 2)
    with pytest.raises(Enough):
        run_forever(config, sessions, sleep=deep, clock=time.clock)
    assert len(time.slept) == 3
    assert sessions.waits[1] == pytest.approx(1120)


def test_once_does_not_wait(coordinator, config):
    time = Time()
    reject(coordinator, 1, RetryWindow(500.0, 600.0))
    run(config, time, 1)
    assert run_session(config, time.clock).outcome == "reported"


CHARGING = Requirements(charging=True)


def test_unmet_conditions_are_read_each_minute_and_nothing_is_sent(coordinator, config):
    states = iter([False] * 3)
    config = replace(config, conditions=lambda: Conditions(charging=next(states, True)), requirements=CHARGING)
    time = Time()
    sessions = run(config, time, 2)
    first, second = sessions.outcomes
    assert (first.outcome, first.reason, first.detail) == ("not-now", "conditions", "not charging")
    assert (second.outcome, sessions.waits[1]) == ("reported", 180)
    assert coordinator.calls.count("check-in") == 1


def test_waiting_for_conditions_does_not_forget_the_window(coordinator, config):
    time = Time()
    reject(coordinator, 1, RetryWindow(500.0, 600.0))
    run(config, time, 1)
    asked = []
    config = replace(config, conditions=lambda: asked.append(time.boot_s) or Conditions(), requirements=CHARGING)
    run(config, time, 1)
    assert asked[0] >= 550


def test_a_state_folder_that_cannot_be_used_still_means_waiting(config, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    sessions = run(replace(config, state=tmp_path / "file"), Time(), 2)
    assert [outcome.reason for outcome in sessions.outcomes] == ["state-unusable"] * 2
    assert sessions.waits[1] >= 60


def test_a_moment_is_exact_within_a_boot_and_bounded_after():
    time = Time()
    moment = Moment.after(100.0, time.clock)
    assert moment.remaining_s(time.clock) == 100
    time.wall -= 1e6
    time.boot_s += 30
    assert moment.remaining_s(time.clock) == 70
    time.reboot()
    assert moment.remaining_s(time.clock) == 100
    time.wall += 2e6
    assert moment.remaining_s(time.clock) == 0


@pytest.mark.parametrize(("named_s", "waits_s"), [(0.0, 1.0), (1e308, 86_400.0)])
def test_no_window_makes_a_device_spin_or_stay_away_for_ever(coordinator, config, named_s, waits_s):
    reject(coordinator, 1, RetryWindow(named_s, named_s))
    assert run(config, Time(2000), 2).waits[1] == pytest.approx(waits_s)


@pytest.mark.parametrize("window", [b'{"min_s": -5, "max_s": -5}', b'{"min_s": 9, "max_s": 5}'])
def test_a_window_that_is_none_is_a_bad_answer_and_costs_hours(coordinator, config, window):
    message = b'{"outcome": "rejected", "reason": "no-task", "retry": ' + window + b"}"
    coordinator.faults["check-in"] = [answer(message)]
    sessions = run(config, Time(1000), 2)
    assert sessions.outcomes[0].reason == "bad-answer"
    assert sessions.waits[1] >= 7200


def test_a_kept_moment_of_negative_length_is_now():
    clock = Time().clock
    assert Moment.after(-5.0, clock).remaining_s(clock) == 0


@pytest.mark.parametrize("source", [lambda: 1 / 0, lambda: None, lambda: Conditions(battery=15)])
def test_failing_source_of_conditions_is_reported_to_the_owner(coordinator, config, source):
    blind = replace(config, conditions=source, requirements=CHARGING)
    outcome = run_session(blind)
    assert (outcome.outcome, outcome.detail) == ("not-now", "unknown: charging or not")
    assert "the source of conditions failed" in outcome.notices[0]
    free = run_session(replace(config, conditions=source))
    assert (free.outcome, len(free.notices)) == ("reported", 1)


def test_another_reason_not_to_work_is_told_and_the_same_one_is_not(coordinator, config):
    states = iter([False, False])
    config = replace(config, conditions=lambda: Conditions(charging=next(states, True)), requirements=CHARGING)
    config = replace(config, policy=Policy(populations=("others",)))
    sessions = run(config, Time(), 2)
    assert [outcome.reason for outcome in sessions.outcomes] == ["conditions", "policy"]


def test_a_device_that_starts_within_a_kept_wait_says_so(coordinator, config, caplog):
    time = Time()
    reject(coordinator, 1, RetryWindow(500.0, 500.0))
    run(config, time, 1)
    run(config, time, 1)
    assert f"comes back in 500 s: the time is kept in {config.state}" in caplog.text


def test_a_time_that_another_process_was_told_meanwhile_is_kept(coordinator, config):
    time = Time()
    reject(coordinator, 1, RetryWindow(100.0, 100.0))
    other = []

    def sleep(seconds):
        time.sleep(seconds)
        if not other:
            other.append(told(config, time, 5000.0))

    sessions = Sessions(time, 2)
    with pytest.raises(Enough):
        run_forever(config, sessions, sleep=sleep, clock=time.clock)
    assert sessions.waits[1] >= 5000


def told(config, time, seconds):
    """Another device with this state folder is told to stay away."""
    with only_session(config.state), open_database(config.state, time.clock) as database:
        Retry(database, config.coordinator, config.population).stay_away_until(Moment.after(seconds, time.clock))
    return True
