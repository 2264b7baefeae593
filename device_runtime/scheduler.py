"""When a device runs its sessions: for ever, as the coordinator's retry windows and the device's conditions allow."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import NoReturn

from device_runtime.clock import Clock, Moment
from device_runtime.database import open_database
from device_runtime.errors import DeviceError, StateInUse
from device_runtime.outcome import Outcome
from device_runtime.retry import Retry
from device_runtime.session import DeviceConfig, run_session
from device_runtime.state import only_session
from fedcore.wire.messages import RetryWindow

# When to come back where the coordinator did not say; after a report at once, as it says so at the next check-in.
AFTER_WORK = RetryWindow(0.0, 2.0)
MINUTES = RetryWindow(60.0, 300.0)
HOURS = RetryWindow(2 * 3600.0, 6 * 3600.0)
# How often to look whether conditions hold. Nothing is sent, so nobody needs these spread.
CONDITIONS = RetryWindow(60.0, 60.0)
# The clock is looked at this often: a machine that slept, or a clock that was set, shows.
LONGEST_NAP_S = 60.0


def run_forever(
    config: DeviceConfig,
    on_outcome: Callable[[Outcome], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
    clock: Clock | None = None,
) -> NoReturn:
    """Run sessions for ever: each comes at a random time in the window that the last one's outcome names.

    That time is kept in the state folder and honoured after a restart. While conditions do not hold, they are looked at
    every minute; `on_outcome` hears of it once. Ends with the exception that ends the process, and leaves a state that
    the next start uses.
    """
    rng, clock = rng or random.Random(), clock or Clock()
    due, told = None, ""
    while True:
        # Before every session, as another process with this state folder may have been told to stay away meanwhile.
        while left_s := max(_left_s(moment, clock) for moment in (due, _kept_time(config, clock))):
            sleep(min(left_s, LONGEST_NAP_S))
        outcome = run_session(config, clock)
        window = outcome.retry or default_window(outcome)
        due = Moment.after(rng.uniform(window.min_s, window.max_s), clock)
        if outcome.outcome != "not-now" and outcome.reason != StateInUse.reason:
            _keep_time(config, clock, due)
        if not outcome.outcome == told == "not-now":
            on_outcome(outcome)
        told = outcome.outcome


def default_window(outcome: Outcome) -> RetryWindow:
    """When to come back after an outcome for which the coordinator named no window."""
    if outcome.outcome in {"reported", "not-needed"}:
        return AFTER_WORK
    if outcome.outcome == "not-now":
        return CONDITIONS
    return HOURS if outcome.retryable == "permanent" else MINUTES


def _left_s(due: Moment | None, clock: Clock) -> float:
    return 0.0 if due is None else due.remaining_s(clock)


def _kept_time(config: DeviceConfig, clock: Clock) -> Moment | None:
    # A state folder that cannot be used is no reason to wait: the session says what is wrong with it.
    with contextlib.suppress(DeviceError), only_session(config.state), open_database(config.state, clock) as database:
        retry = Retry(database, config.coordinator, config.population)
        due = retry.not_before()
        if due is not None:
            due = due.carried_over(clock)
            retry.stay_away_until(due)
        return due
    return None


def _keep_time(config: DeviceConfig, clock: Clock, due: Moment) -> None:
    # This process waits all the same, and the next session says what is wrong.
    with contextlib.suppress(DeviceError), only_session(config.state), open_database(config.state, clock) as database:
        Retry(database, config.coordinator, config.population).stay_away_until(due)
