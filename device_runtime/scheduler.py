"""The scheduler: it runs sessions forever, as the coordinator's retry windows and the device's conditions allow."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import NoReturn

from device_runtime.clock import Clock, Moment
from device_runtime.config import DeviceConfig
from device_runtime.errors import DeviceError, StateInUse
from device_runtime.outcome import Outcome
from device_runtime.session import run_session
from device_runtime.state.database import open_database
from device_runtime.state.folder import only_session
from device_runtime.state.retry import Retry
from fedcore.wire.messages import RetryWindow

_LOG = logging.getLogger(__name__)
# Faults that the owner repairs on this device. After a restart it need not wait.
MENDED_HERE = frozenset({"bad-configuration", "invalid-examples"})
# When to return if the coordinator did not say; after a report at once, as the next check-in has an answer.
AFTER_WORK = RetryWindow(0.0, 2.0)
MINUTES = RetryWindow(60.0, 300.0)
HOURS = RetryWindow(2 * 3600.0, 6 * 3600.0)
# A coordinator may name any window; a device neither returns in a busy loop nor stays away forever.
SHORTEST_S, LONGEST_S = 1.0, 86_400.0
# How often to check conditions. Nothing is sent, so the checks need no random spread.
CONDITIONS = RetryWindow(60.0, 60.0)
# How often to read the clock, so as to notice that the machine slept or the clock was set.
LONGEST_NAP_S = 60.0


def run_forever(
    config: DeviceConfig,
    on_outcome: Callable[[Outcome], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
    clock: Clock | None = None,
) -> NoReturn:
    """Run sessions forever, each at a random time in the window that the last outcome names.

    That time is stored in the state folder and honoured after a restart. While conditions do not hold, they are checked
    every minute; `on_outcome` is called once for each reason. Ends with the exception that ends the process, and leaves
    a state that the next start uses.
    """
    rng, clock = rng or random.Random(), clock or Clock()
    due, told = None, ("", "")
    if left_s := _left_s(_kept_time(config, clock), clock):
        _LOG.warning("this device comes back in %.0f s: the time is kept in %s", left_s, config.state)
    while True:
        # Before every session, because another process with this state folder may have been told to stay away.
        while left_s := max(_left_s(moment, clock) for moment in (due, _kept_time(config, clock))):
            sleep(min(left_s, LONGEST_NAP_S))
        outcome = run_session(config, clock)
        due = Moment.after(_drawn_s(outcome, rng), clock)
        if outcome.outcome != "not-now" and outcome.reason not in {*MENDED_HERE, StateInUse.reason}:
            _keep_time(config, clock, due)
        ended = outcome.outcome, outcome.reason
        if outcome.outcome != "not-now" or ended != told:
            on_outcome(outcome)
        told = ended


def _drawn_s(outcome: Outcome, rng: random.Random) -> float:
    """Seconds to stay away after an outcome."""
    if outcome.retry is None:
        window = default_window(outcome)
        return rng.uniform(window.min_s, window.max_s)
    return min(max(rng.uniform(outcome.retry.min_s, outcome.retry.max_s), SHORTEST_S), LONGEST_S)


def default_window(outcome: Outcome) -> RetryWindow:
    """The window after an outcome for which the coordinator named none."""
    if outcome.outcome in {"reported", "not-needed"}:
        return AFTER_WORK
    if outcome.outcome == "not-now":
        return CONDITIONS
    return HOURS if outcome.retryable == "permanent" else MINUTES


def _left_s(due: Moment | None, clock: Clock) -> float:
    return 0.0 if due is None else due.remaining_s(clock)


def _kept_time(config: DeviceConfig, clock: Clock) -> Moment | None:
    # If the state folder cannot be used, do not wait: the session will say what is wrong with it.
    with contextlib.suppress(DeviceError), only_session(config.state), open_database(config.state, clock) as database:
        retry = Retry(database, config.coordinator, config.population)
        due = retry.not_before()
        if due is not None:
            due = due.carried_over(clock)
            retry.stay_away_until(due)
        return due
    return None


def _keep_time(config: DeviceConfig, clock: Clock, due: Moment) -> None:
    # This process waits anyway, and the next session will say what is wrong.
    with contextlib.suppress(DeviceError), only_session(config.state), open_database(config.state, clock) as database:
        Retry(database, config.coordinator, config.population).stay_away_until(due)
