"""The check that a round could fill: asked of the whole population at once, before a day is simulated."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from simulator.errors import ForecastError
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.devices import WAIT_S, Devices
from simulator.forecast.stretches import DAY_S

_SETTINGS = {"examples": "min_examples", "conditions": "needs_unmetered"}
_LOOKED_AT = 100_000
_LUCK = 4.0
"""A round that needs this many standard deviations more than it can expect does not come about."""


def check_fills(config: ForecastConfig, devices: Devices) -> None:
    """Raise ForecastError, naming the setting that leaves too few devices, where no round could come to its minimum."""
    policy = config.task.policy
    least = 1 if policy.buffered else policy.minimum
    left = np.ones(len(devices), np.bool_)
    if len(devices) < least:
        raise _starved(config, "devices", len(devices), least)
    for index, obstacle in enumerate(devices.obstacles[1:], start=1):
        left &= devices.obstacle != index
        if left.sum() < least:
            raise _starved(config, _SETTINGS[obstacle], int(left.sum()), least)
    left &= devices.work_s < policy.reporting_deadline_s
    if left.sum() < least:
        work_s = float(np.median(devices.work_s))
        raise _starved(
            config, "reporting_deadline_s", int(left.sum()), least, f"; work takes {work_s:,.0f} s in the median"
        )
    stretches = "charging_s" if config.trace is None else "trace"
    left &= devices.work_s < devices.stretches.longest_s()
    if left.sum() < least:
        raise _starved(config, stretches, int(left.sum()), least, ", the others leave before their work is done")
    if (there := _at_best(devices, left)) < least:
        raise _starved(config, stretches, there, least, ", at the best hour of a day")
    waiting = there * WAIT_S / (WAIT_S + config.retry_min_s)
    if waiting + _LUCK * math.sqrt(waiting) < least:
        words = f", who wait at the same time, for {WAIT_S:g} s, at the best hour of a day"
        raise _starved(config, "retry_min_s", int(waiting), least, words)
    _check_luck(config)


def _check_luck(config: ForecastConfig) -> None:
    """Refuse rounds that lose so many devices that even their replacements do not bring them to the minimum."""
    policy, lost = config.task.policy, config.drop_out
    if policy.buffered and lost < 1:
        return
    drawn = policy.cohort * (1 + lost)
    most = drawn * (1 - lost) + _LUCK * math.sqrt(drawn * lost * (1 - lost))
    if most < policy.minimum:
        words = (
            f"{most:.0f} reports of a round of {policy.cohort} devices at best, and it counts from {policy.minimum} on"
        )
        raise ForecastError(f"no round can fill: drop_out={lost:g} leaves {words}; lower it or minimum, or draw more")


def _at_best(devices: Devices, left: NDArray[np.bool_]) -> int:
    """How many of the devices that are left can come at once, at the best hour of the second day."""
    rows = np.flatnonzero(left)
    some = rows[:: max(1, len(rows) // _LOOKED_AT)]
    hours = DAY_S + 3600.0 * np.arange(24)
    most = max(int(np.count_nonzero(devices.stretches.can_until(some, hour))) for hour in hours)
    return most * len(rows) // len(some)


def _starved(config: ForecastConfig, name: str, left: int, least: int, more: str = "") -> ForecastError:
    return ForecastError(
        f"no round can fill: {name}={getattr(config, name)} leaves {left:,} of {config.devices:,} devices{more}, and a "
        f"round counts from {least:,} on; change it or goal"
    )
